"""OpenVINO GenAI; ``model`` is the exported folder, ``modes`` maps a name to options of pipeline and generation."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from worker import Generate, Pipe, settings


def main() -> None:
    asked = settings()
    pipe = Pipe()
    modes = {name: make(asked["model"], asked["threads"], options) for name, options in asked["modes"].items()}
    pipe.serve(modes, versions={"openvino-genai": metadata.version("openvino-genai")}, dtype="bfloat16")


def make(folder: str, threads: int, options: dict[str, Any]) -> Generate:
    import numpy as np
    import openvino as ov
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(
        folder, "CPU", INFERENCE_PRECISION_HINT="bf16", INFERENCE_NUM_THREADS=threads,
        **options.get("pipeline", {}),
    )  # fmt: skip

    def run(prompt_token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=max_tokens, ignore_eos=True, do_sample=False, **options.get("generation", {})
        )
        result = pipeline.generate(ov.Tensor(np.array([prompt_token_ids], dtype=np.int64)), config)
        times = result.perf_metrics
        return {
            "token_ids": list(result.tokens[0]),
            "first_s": times.get_ttft().mean / 1000,
            "total_s": times.get_generate_duration().mean / 1000,
            "num_first_tokens": 1,
            "num_drafts": None,
            "num_draft_tokens": None,
            "num_accepted_tokens": None,
        }

    return run


if __name__ == "__main__":
    main()
