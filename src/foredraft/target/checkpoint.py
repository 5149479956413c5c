"""What a model folder holds, read without loading it: configuration, weight files, fingerprint. No torch."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.errors import ModelLoadError

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


def read_config(path: Path) -> dict[str, Any]:
    """The content of config.json as it stands.

    Raises:
        ModelLoadError: there is none, with what the folder may be instead; or it is not a JSON object.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ModelLoadError(f"{path} has no config.json, so it is no model folder{_what_it_may_be(path)}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds a JSON {type(content).__name__}, not an object")
    return content


def check_weight_files(path: Path) -> list[Path]:
    """The safetensors files of the folder, each with a readable header and its full length.

    Raises:
        ModelLoadError: a file is missing, cut off or no safetensors file; the file is named.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{index} is not a valid index of weight files: {error!r}") from error
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        others = sorted(file.name for file in path.glob("*.bin"))
        hint = f"; it has {others[0]}, so save the model again as safetensors" if others else ""
        raise ModelLoadError(f"{path} lacks the weight files {', '.join(missing)}{hint}")
    for name in names:
        _check_safetensors(path / name)
    return [path / name for name in names]


def _check_safetensors(file: Path) -> None:
    size = file.stat().st_size
    try:
        header, start = _safetensors_header(file)
        end = start + max(
            (entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0
        )
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelLoadError(
            f"{file} ({size} bytes) is not a safetensors file, or its start is damaged: {error!r}"
        ) from error
    if size != end:
        raise ModelLoadError(
            f"{file} has {size} bytes, but its header speaks of {end}: the file is incomplete or damaged; "
            "fetch it again"
        )


def _safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file and the offset of its data."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > file.stat().st_size:
            raise ValueError(f"a header of {length} bytes")
        return json.loads(stream.read(length)), 8 + length


def fingerprint(path: Path, weights: list[Path]) -> str:
    """16 hex digits of a hash over config.json and, of each weight file, size, header and data samples.

    The samples are spread evenly: fine-tuned weights of the same shapes are told apart within milliseconds.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in weights:
        size = file.stat().st_size
        _, start = _safetensors_header(file)
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(start))
            for sample in range(_SAMPLES_PER_FILE):
                stream.seek(start + (size - start) * sample // _SAMPLES_PER_FILE)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _what_it_may_be(path: Path) -> str:
    if ggufs := sorted(path.glob("*.gguf")):
        return f"; convert {ggufs[0].name} once with {convert_call(ggufs[0])}"
    if (path / "adapter_config.json").is_file():
        return "; it holds an adapter (PEFT): merge it into its base model and save that"
    inner = sorted(config.parent for config in path.glob("*/config.json"))
    return f"; did you mean {inner[0]}?" if inner else ""


def convert_call(gguf: Path) -> str:
    """The Python call that makes a model folder of a GGUF file, for messages."""
    return f"foredraft.target.convert.convert_gguf(Path({str(gguf)!r}), Path({gguf.stem!r}))"


def mtp_module(name: str, config: Mapping[str, Any]) -> str | None:
    """What the names of a module for multi-token prediction begin with, if a tensor belongs to one.

    Args:
        name: of a tensor: ``mtp.*`` in Qwen's files, ``model.mtp_layers.0.*`` in MiMo's, ``mtp_layers.0.*`` in
            speculators', layers behind the model's last in DeepSeek's.
        config: of the model's text part.
    """
    if name.startswith("mtp."):
        module = re.match(r"mtp\.layers\.([1-9]\d*)\.", name)
        return module[0] if module else "mtp."
    if match := re.match(r"(?:model\.)?mtp_layers\.\d+\.", name):
        return match[0]
    match = re.match(r"model\.layers\.(\d+)\.", name)
    num_layers = config.get("num_hidden_layers")
    return match[0] if match and num_layers is not None and int(match[1]) >= num_layers else None
