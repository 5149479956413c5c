"""The same bf16 weights in the formats of OpenVINO and llama.cpp, made once and kept in the cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def export_openvino(python: str, folder: Path, cache: Path) -> Path:
    """OpenVINO's model with 16-bit weights, and its tokenizer; by optimum in OpenVINO's own environment."""
    wanted = cache / f"{folder.name}-openvino-fp16"
    if not (wanted / "openvino_model.xml").exists():
        command = [
            str(Path(python).parent / "optimum-cli"), "export", "openvino", "-m", str(folder),
            "--task", "text-generation-with-past", "--weight-format", "fp16",
        ]  # fmt: skip
        _make(wanted, command, {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"})
    return wanted


def make_gguf(python: str, source: str | None, folder: Path, cache: Path) -> Path:
    """llama.cpp's file in bf16; by the converter of its source tree.

    Args:
        python: with torch, transformers and sentencepiece.
        source: the folder with convert_hf_to_gguf.py.
    """
    wanted = cache / f"{folder.name}-bf16.gguf"
    if not wanted.exists():
        if source is None:
            raise SystemExit(f"{wanted} does not exist; add --llama-source, the folder with convert_hf_to_gguf.py")
        converter = Path(source) / "convert_hf_to_gguf.py"
        command = [python, str(converter), str(folder), "--outtype", "bf16", "--outfile"]
        _make(wanted, command, {"PYTHONPATH": str(Path(source) / "gguf-py"), "HF_HUB_OFFLINE": "1"})
    return wanted


def _make(wanted: Path, command: list[str], environment: dict[str, str]) -> None:
    """Run a command with the output as its last argument; an interrupted one leaves nothing that looks complete."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    unfinished = wanted.with_name("unfinished-" + wanted.name)
    print(f"making {wanted}", file=sys.stderr)
    done = subprocess.run([*command, str(unfinished)], env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(done.args)} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    unfinished.rename(wanted)
