"""How large the cache may be by default: a part of what is really free."""

from __future__ import annotations

import pytest
import torch

from foredraft.config import EngineConfig
from foredraft.target import memory
from foredraft.target.memory import CPU_SHARE, free_memory_bytes, kv_cache_bytes

CPU = torch.device("cpu")


def test_the_option_goes_before_the_default():
    """GiB are 2**30 bytes."""
    assert kv_cache_bytes(EngineConfig(model="x", kv_cache_gb=0.5), CPU) == 2**29


def test_the_default_is_a_part_of_what_is_free():
    """Less than the machine has, and not nothing; two readings may differ by what others took."""
    free = free_memory_bytes()
    assert 2**26 < free < 2**50
    assert kv_cache_bytes(EngineConfig(model="x"), CPU) == pytest.approx(CPU_SHARE * free, rel=0.2)


def test_a_container_has_no_more_than_its_limit(tmp_path, monkeypatch):
    """What it uses already is not free; a limit of "max" is none."""
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(memory, "CGROUPS", ((str(limit), str(used)), ("/nowhere", "/nowhere")))
    used.write_text("3000")
    limit.write_text("10000\n")
    assert free_memory_bytes() == 7000
    limit.write_text("max\n")
    assert free_memory_bytes() > 7000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_used_up_to_the_share():
    """Half of the memory less what is in use."""
    device = torch.device("cuda")
    free, total = torch.cuda.mem_get_info(device)
    found = kv_cache_bytes(EngineConfig(model="x", gpu_memory_utilization=0.5), device)
    assert found == pytest.approx(free - 0.5 * total, rel=0.05)
