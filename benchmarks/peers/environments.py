"""The variables that a peer's process needs."""

from __future__ import annotations

from pathlib import Path


def vllm_environment(python: str, threads: int) -> dict[str, str]:
    """What vLLM needs on a CPU: cores to bind to, or it computes with one thread, and Intel's OpenMP if it is there."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": "",
    }
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    return settings | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})
