"""How many bytes of keys and values a model may keep."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from foredraft.config import EngineConfig

CPU_SHARE = 0.4
"""Of the memory that is free when the model is loaded; the rest is for others, and for draft models."""
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of memory of a container, in both versions of Linux's control groups."""


def kv_cache_bytes(config: EngineConfig, device: torch.device) -> int:
    """The limit that a configuration sets, or the default for the device, whose weights are loaded."""
    if config.kv_cache_gb is not None:
        return int(config.kv_cache_gb * 2**30)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(0, int(free + held - (1.0 - config.gpu_memory_utilization) * total))
    return int(CPU_SHARE * free_memory_bytes())


def free_memory_bytes() -> int:
    """Memory that programs can get without swapping: of the machine, or of the container if that has less."""
    found = [_free_of_machine()]
    for limit, used in CGROUPS:
        values = _read_int(limit), _read_int(used)
        if values[0] is not None and values[1] is not None:
            found.append(max(0, values[0] - values[1]))
    return min(found)


def _free_of_machine() -> int:
    """``MemAvailable`` on Linux; elsewhere half of what is built in."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
