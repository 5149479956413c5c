"""How fast devices read memory and multiply: vendors' figures, and the machine under our feet measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from foredraft.errors import InvalidOptionError

THIS_DEVICE = "this"


@dataclass(frozen=True, slots=True)
class Device:
    """Memory bandwidth and dense bf16 rate (no sparsity, 32-bit accumulation) of one device.

    ``source`` says whose figures they are. Peaks, not what a program reaches, unless measured.
    """

    key: str
    name: str
    bandwidth_bytes_per_s: float
    flops_per_s: float
    source: str


def _device(key: str, name: str, gigabytes_per_s: float, teraflops: float, source: str) -> Device:
    return Device(key, name, gigabytes_per_s * 1e9, teraflops * 1e12, source)


_NVIDIA = "NVIDIA data sheet"
_WHITEPAPER = "NVIDIA architecture white paper"
_APPLE = "Apple (bandwidth, GPU rate in fp32; no bf16 figure)"
_APPLE_ESTIMATE = "Apple (bandwidth); rate estimated from cores and clock"
_COMPUTED = "computed: DDR5 channels; cores x base clock x operations per cycle"

DEVICES = (
    _device("b200", "NVIDIA B200", 8000, 2250, _NVIDIA),
    _device("h200", "NVIDIA H200 SXM", 4800, 989.5, _NVIDIA),
    _device("h100-sxm", "NVIDIA H100 SXM", 3350, 989.4, _NVIDIA),
    _device("h100-nvl", "NVIDIA H100 NVL", 3900, 835.5, _NVIDIA),
    _device("h100-pcie", "NVIDIA H100 PCIe", 2000, 756, _NVIDIA),
    _device("a100-80gb-sxm", "NVIDIA A100 80 GB SXM", 2039, 312, _NVIDIA),
    _device("a100-80gb-pcie", "NVIDIA A100 80 GB PCIe", 1935, 312, _NVIDIA),
    _device("a100-40gb", "NVIDIA A100 40 GB", 1555, 312, _NVIDIA),
    _device("l40s", "NVIDIA L40S", 864, 362, _NVIDIA),
    _device("l4", "NVIDIA L4", 300, 121, _NVIDIA),
    _device("a10", "NVIDIA A10", 600, 125, _NVIDIA),
    _device("t4", "NVIDIA T4 (fp16; it has no bf16)", 320, 65, _NVIDIA),
    _device("rtx-5090", "GeForce RTX 5090", 1792, 209.5, _WHITEPAPER),
    _device("rtx-4090", "GeForce RTX 4090", 1008, 165.2, _WHITEPAPER),
    _device("rtx-3090", "GeForce RTX 3090", 936, 71, _WHITEPAPER),
    _device("mi300x", "AMD Instinct MI300X", 5300, 1307.4, "AMD data sheet"),
    _device("mi355x", "AMD Instinct MI355X", 8000, 2516, "AMD data sheet"),
    _device("tpu-v5e", "Google TPU v5e", 819, 197, "Google Cloud documentation"),
    _device("tpu-v6e", "Google TPU v6e", 1640, 918, "Google Cloud documentation"),
    _device("m1-max", "Apple M1 Max", 400, 10.4, _APPLE),
    _device("m2-ultra", "Apple M2 Ultra (76-core GPU)", 800, 27.2, _APPLE_ESTIMATE),
    _device("m4-max", "Apple M4 Max (40-core GPU)", 546, 16, _APPLE_ESTIMATE),
    _device("2x-xeon-8480", "2 x Intel Xeon 8480+ (AMX)", 614, 459, _COMPUTED),
    _device("2x-epyc-9654", "2 x AMD EPYC 9654 (AVX-512 bf16)", 922, 29.5, _COMPUTED),
)


def find_device(key: str) -> Device:
    """The device of that key, or for ``this`` the one we run on, measured.

    Raises:
        InvalidOptionError: there is none; the message names the nearest known one.
    """
    if key == THIS_DEVICE:
        return measure_this_device()
    by_key = {device.key: device for device in DEVICES}
    if key.lower() in by_key:
        return by_key[key.lower()]
    longer = [known for known in by_key if key and known.startswith(key.lower())]
    near = longer or get_close_matches(key.lower(), [*by_key, THIS_DEVICE], n=1, cutoff=0.3)
    hint = f"did you mean {near[0]!r}?" if near else "the list: foredraft lab roofline --devices"
    raise InvalidOptionError(f"no device {key!r} is known; {hint}")


def measure_this_device(*, budget_s: float = 1.5) -> Device:
    """Best read bandwidth and bf16 matrix-product rate of the default accelerator, else of this CPU.

    Reads a 512 MB tensor and multiplies square matrices of 2048 (8192 on an accelerator) over and over for
    ``budget_s`` seconds in all, and takes the fastest pass. Uses torch's threads as they are set.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    place = accelerator or torch.device("cpu")

    def synchronize() -> None:
        if accelerator is not None:
            torch.accelerator.synchronize()

    num_bytes, size = 512 * 1024**2, 2048 if accelerator is None else 8192
    with torch.inference_mode():
        values = torch.ones(num_bytes // 4, device=place)
        read_s = _fastest_s(values.sum, synchronize, 0.5 * budget_s)
        left = torch.ones(size, size, dtype=torch.bfloat16, device=place)
        right = torch.ones(size, size, dtype=torch.bfloat16, device=place)
        multiply_s = _fastest_s(lambda: left @ right, synchronize, 0.5 * budget_s)
    what = place.type if accelerator is None else torch.cuda.get_device_name() if place.type == "cuda" else place.type
    threads = f", {torch.get_num_threads()} threads" if accelerator is None else ""
    return Device(
        key=THIS_DEVICE,
        name=f"this machine ({what}{threads})",
        bandwidth_bytes_per_s=num_bytes / read_s,
        flops_per_s=2.0 * size**3 / multiply_s,
        source="measured now: fastest pass of tensor sum (fp32) and matrix product (bf16)",
    )


def _fastest_s(operation: Callable[[], object], synchronize: Callable[[], None], budget_s: float) -> float:
    """Seconds of the fastest call after a warm-up; at least three calls, then until the budget is spent."""
    operation()
    synchronize()
    begin, fastest, num_calls = time.perf_counter(), float("inf"), 0
    while num_calls < 3 or time.perf_counter() - begin < budget_s:
        start = time.perf_counter()
        operation()
        synchronize()
        fastest = min(fastest, time.perf_counter() - start)
        num_calls += 1
    return fastest
