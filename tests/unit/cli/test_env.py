"""What `foredraft env` finds in the cache folder, and why there are no kernels."""

import json

import pytest
import torch
from typer.testing import CliRunner

from foredraft.cli import env
from foredraft.cli.main import app
from foredraft.target import native_build


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path))
    monkeypatch.setattr(native_build, "native_library", lambda folder: None)
    return tmp_path


def test_an_empty_folder(folder):
    found = env.describe()
    assert found["models"] == []
    assert found["numerics"] == []
    assert dict(env._rows(found))["models there"] == "none yet"


def test_models_and_self_checks_are_listed_and_what_is_broken_is_not(folder):
    (folder / "models" / "tiny").mkdir(parents=True)
    (folder / "models" / "tiny" / "config.json").write_text("{}")
    (folder / "models" / "half").mkdir()
    (folder / "numerics").mkdir()
    (folder / "numerics" / "a.json").write_text('{"contract": "token-identical", "shape": {"min_tokens": 2}}')
    (folder / "numerics" / "b.json").write_text("{")
    found = env.describe()
    assert found["models"] == [{"name": "tiny", "bytes": 2}]
    assert [answer["contract"] for answer in found["numerics"]] == ["token-identical"]
    json.dumps(found)


@pytest.mark.parametrize(
    ("bf16", "compiler", "words"),
    [
        (False, "/usr/bin/g++", "no AVX512-BF16"),
        (True, None, "install g++ or clang++"),
        (True, "/usr/bin/g++", "the compiler failed, or torch brings no OpenMP runtime"),
    ],
)
def test_the_reason_why_there_are_no_kernels(folder, monkeypatch, bf16, compiler, words):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(env.shutil, "which", lambda name: compiler)
    found = env.kernels(folder)
    assert not found["built"]
    assert words in found["reason"]


def test_the_kinds_of_models():
    """As JSON and as a table; what is refused has its reason."""
    found = json.loads(CliRunner().invoke(app, ["env", "--models", "--json"]).stdout)
    assert {"llama", "gpt2"} <= set(found["attention"])
    assert {"mamba2", "lfm2"} <= set(found["replayed"])
    assert "mamba" in found["stepped"]
    assert "time_step_min" in found["refused"]["zamba2"]
    shown = CliRunner().invoke(app, ["env", "--models"], terminal_width=200).stdout
    assert all(name in shown for names in found.values() for name in names)
