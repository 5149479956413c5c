"""vLLM on a CPU; ``modes`` maps one name to its speculative configuration, or to None.

``enforce_eager`` skips compilation: a start of seconds instead of a minute, and slower passes.
"""

from __future__ import annotations

from typing import Any

from worker import Pipe, settings

COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "num_accepted_tokens_per_pos",
}


def main() -> None:
    asked = settings()
    pipe = Pipe()
    import vllm

    [(name, speculative)] = asked["modes"].items()
    llm = vllm.LLM(
        asked["model"], dtype=asked["dtype"], max_model_len=2048, max_num_seqs=1, enable_prefix_caching=False,
        speculative_config=speculative, disable_log_stats=False, enforce_eager=asked.get("enforce_eager", False),
    )  # fmt: skip

    def run(prompt_token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        before = counts(llm)
        output = llm.generate({"prompt_token_ids": prompt_token_ids}, params, use_tqdm=False)[0]
        after = counts(llm)
        times = output.metrics
        return {
            "token_ids": list(output.outputs[0].token_ids),
            "first_s": times.first_token_latency,
            "total_s": times.first_token_latency + times.last_token_ts - times.first_token_ts,
            "num_first_tokens": 1,
            **{key: difference(after[key], before[key]) for key in after},
        }

    pipe.serve({name: run}, versions={"vllm": vllm.__version__}, dtype=asked["dtype"])


def counts(llm: Any) -> dict[str, Any]:
    """What vLLM has counted so far; a list by position of the draft for the last one. None where nothing is drafted."""
    found: dict[str, Any] = dict.fromkeys(COUNTERS.values())
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            found[COUNTERS[metric.name]] = getattr(metric, "values", None) or metric.value
    return found


def difference(after: Any, before: Any) -> Any:
    if isinstance(after, list):
        return [late - early for late, early in zip(after, before, strict=True)]
    return None if after is None else after - before


if __name__ == "__main__":
    main()
