"""foredraft itself; ``modes`` are speculative configurations, all on one target."""

from __future__ import annotations

from typing import Any

from worker import Generate, Pipe, settings


def main() -> None:
    asked = settings()
    pipe = Pipe()
    from foredraft import LLM, SpeculativeConfig
    from foredraft.measure.arms import ForedraftArm
    from foredraft.measure.machine import versions

    llm = LLM(asked["model"], dtype=asked["dtype"], num_threads=asked["threads"], enable_prefix_caching=False)
    modes = {
        name: generate(ForedraftArm(llm, SpeculativeConfig.from_options(config)))
        for name, config in asked["modes"].items()
    }
    pipe.serve(modes, versions=versions(), contract=llm.numerics.contract, dtype=str(llm.loaded.dtype))


def generate(arm: Any) -> Generate:
    """Of an arm of :mod:`foredraft.measure`, ours or that of transformers."""

    def run(prompt_token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        from foredraft.measure.metrics import accepted_per_pass

        run = arm.run(prompt_token_ids, temperature=0.0, seed=0, max_tokens=max_tokens)
        drafts = [
            (width, accepted)
            for width, accepted in zip(run.drafted, accepted_per_pass(run.emitted), strict=True)
            if width
        ]
        return {
            "token_ids": run.token_ids,
            "first_s": run.first_s,
            "total_s": run.total_s,
            "num_first_tokens": run.emitted[0],
            "num_drafts": len(drafts),
            "num_draft_tokens": sum(width for width, _ in drafts),
            "num_accepted_tokens": sum(accepted for _, accepted in drafts),
            "num_accepted_tokens_per_pos": [
                sum(accepted > position for _, accepted in drafts) for position in range(arm.num_speculative_tokens)
            ],
            "num_target_passes": run.num_target_passes,
            "split_s": {
                "draft": run.split.draft_s,
                "target": run.split.target_s,
                "verify": run.split.verify_s,
                "host": run.split.host_s,
            },
        }

    return run


if __name__ == "__main__":
    main()
