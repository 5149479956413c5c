"""vLLM in an environment of its own, driven over a pipe by throughput_peers.py: loads a model once, then answers.

A line on stdin is {"prompts": [[token ids], ...], "max_tokens": n}; the answer is a line "RESULT {...}" on stdout with
the seconds from the first request to the last token, and the number of new tokens of each request.
"""

from __future__ import annotations

import json
import sys
import time


def main(model: str, max_num_seqs: int, max_model_len: int) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="bfloat16", max_num_seqs=max_num_seqs, max_model_len=max_model_len, enable_prefix_caching=False
    )
    print("RESULT", json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": token_ids} for token_ids in asked["prompts"]]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        print("RESULT", json.dumps({"seconds": seconds, "lengths": lengths}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
