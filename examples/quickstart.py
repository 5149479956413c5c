"""Plain and n-gram decoding of the same prompts: the same tokens, fewer passes of the target.

python examples/quickstart.py [MODEL]
"""

import sys

from foredraft import LLM, SamplingParams

PROMPTS = [
    "Repeat this list twice: apples, pears, plums, cherries, apricots.",
    "Name three rivers of Europe.",
]


def main(model: str = "smollm2-135m-instruct", max_tokens: int = 48) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    outputs = {}
    for method in ("none", "ngram"):
        llm = LLM(model, speculative_config={"method": method})
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        outputs[method] = llm.chat(chats, params)
    for plain, drafted in zip(outputs["none"], outputs["ngram"], strict=True):
        print(drafted.outputs[0].text.strip())
        print(f"  identical: {plain.outputs[0].token_ids == drafted.outputs[0].token_ids}")
        print(f"  tokens per target pass: {drafted.metrics.tokens_per_target_pass:.2f}, contract {drafted.contract}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
