"""Build and load the C++ kernels of ``native/``: one compiler call of a second, cached by source and flags.

The kernels matter twice. They compute every output in one fixed order, so a row's bits do not depend on the
batch (oneDNN and MKL choose another kernel by the number of rows); and they read weights at the speed of
memory for the few rows of a verify pass, where oneDNN reaches half of it. Without a compiler or without
AVX512-BF16 the library is None and torch's own kernels are used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from importlib import resources
from pathlib import Path

import torch

FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512bf16",
    "-mfma",
)
_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "foredraft_linear_bf16": [_POINTER] * 4 + [_SIZE] * 4 + [_INT],
    "foredraft_rms_norm_bf16": [_POINTER] * 3 + [_SIZE] * 3 + [_FLOAT, _INT],
    "foredraft_silu_mul_bf16": [_POINTER] * 2 + [_SIZE] * 2 + [_INT],
    "foredraft_rotate_store_bf16": [_POINTER] * 9 + [_SIZE] * 4 + [_FLOAT, _INT],
    "foredraft_attention_bf16": [_POINTER] * 8 + [_SIZE] * 8 + [_FLOAT] * 2 + [_INT],
    "foredraft_layers_bf16": [_POINTER] * 14 + [_SIZE] * 7 + [_INT],
    "foredraft_chain_bf16": [_POINTER] * 15 + [_SIZE] * 5 + [_INT],
}


@functools.cache
def native_library(folder: Path) -> ctypes.CDLL | None:
    """The kernels, built into ``folder`` if they are not there yet; None where they cannot run."""
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    sources = {
        f.name: f.read_bytes()
        for f in resources.files("foredraft.target").joinpath("native").iterdir()
        if f.name.endswith((".cpp", ".h"))
    }
    openmp = _torch_openmp()
    compiler = shutil.which("g++") or shutil.which("clang++")
    if openmp is None or compiler is None:
        return None
    key = hashlib.sha256(repr((sorted(sources.items()), FLAGS, compiler, str(openmp))).encode()).hexdigest()[:16]
    library = folder / "native" / f"kernels-{key}.so"
    if not library.exists() and not _compile(sources, compiler, openmp, library):
        return None
    loaded = ctypes.CDLL(str(library))
    for name, arguments in _SIGNATURES.items():
        getattr(loaded, name).argtypes = arguments
        getattr(loaded, name).restype = None
    return loaded


def _torch_openmp() -> Path | None:
    """The OpenMP runtime that torch itself uses: a second one in the process would fight it for the cores."""
    root = Path(torch.__file__).parent
    for place in (root / "lib", root.parent / "torch.libs"):
        found = sorted(place.glob("libgomp*.so*"))
        if found:
            return found[0]
    return None


def _compile(sources: dict[str, bytes], compiler: str, openmp: Path, library: Path) -> bool:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = []
        for name, text in sources.items():
            path = Path(scratch, name)
            path.write_bytes(text)
            if name.endswith(".cpp"):
                objects.append(str(path.with_suffix(".o")))
        for target in objects:
            source = target.removesuffix(".o") + ".cpp"
            built = subprocess.run([compiler, *FLAGS, "-c", source, "-o", target], capture_output=True, check=False)
            if built.returncode:
                return _failed(built.stderr)
        made = Path(scratch, "kernels.so")
        linked = subprocess.run([compiler, "-shared", *objects, "-o", str(made), str(openmp)], capture_output=True)
        if linked.returncode:
            return _failed(linked.stderr)
        os.replace(made, library)
    return True


def _failed(message: bytes) -> bool:
    first = next((line for line in message.decode(errors="replace").splitlines() if "error" in line), "no message")
    warnings.warn(f"the CPU kernels could not be compiled, torch's own are used: {first}", stacklevel=4)
    return False
