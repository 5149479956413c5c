"""What was measured of a model on this machine, kept in the cache folder until anything changes that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import foredraft.target
from foredraft.config import EngineConfig
from foredraft.target.forward import TargetModel
from foredraft.target.zoo import cache_folder


def measurement_file(kind: str, target: TargetModel, fingerprint: str, config: EngineConfig) -> Path:
    """Where a measurement of this kind is kept.

    Args:
        fingerprint: changes with the model's configuration or weights.
    """
    return cache_folder(config.cache_dir) / kind / f"{_key(target, fingerprint, config)}.json"


def read_measurement(file: Path) -> dict[str, Any]:
    """What was written; empty if there is nothing that can be read."""
    try:
        stored = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def write_measurement(file: Path, found: Mapping[str, Any]) -> None:
    """Write at once or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(found))
    os.replace(scratch, file)


def _key(target: TargetModel, fingerprint: str, config: EngineConfig) -> str:
    """Everything that the answer may depend on."""
    code = b"".join(
        p.read_bytes()
        for p in sorted(Path(foredraft.target.__path__[0]).rglob("*"))
        if p.is_file() and p.suffix in (".py", ".cpp", ".h")
    )
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.processor()
    about = (
        fingerprint,
        str(target.dtype),
        str(target.device),
        device,
        torch.get_num_threads(),
        torch.__version__,
        transformers.__version__,
        torch.__config__.show() if target.device.type == "cpu" else "",
        config.packed,
        config.compile,
        target.native is not None,
        target.max_model_len,
        os.cpu_count(),
        hashlib.sha256(code).hexdigest(),
    )
    return hashlib.sha256(repr(about).encode()).hexdigest()[:24]
