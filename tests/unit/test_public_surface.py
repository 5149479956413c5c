"""What ``import foredraft`` gives, and what it does not do."""

from __future__ import annotations

import subprocess
import sys

import pytest

import foredraft

NAMES = {
    "LLM",
    "Engine",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "transformers_generate",
}


def test_the_public_names_are_these():
    """A name more or less is a decision, not an accident."""
    assert set(foredraft.__all__) == NAMES
    assert foredraft.__all__ == sorted(foredraft.__all__, key=lambda name: (name.islower(), name != "LLM", name))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_name_can_be_imported(name):
    """Lazily, from its home."""
    assert getattr(foredraft, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    """Not an import error from inside."""
    with pytest.raises(AttributeError, match="module 'foredraft' has no attribute 'LLMs'"):
        foredraft.LLMs  # noqa: B018


@pytest.mark.parametrize(
    "code", ["import foredraft", "from foredraft import SamplingParams, SpeculativeConfig, EngineConfig"]
)
def test_import_does_not_import_torch(code):
    """The command line answers --help at once."""
    program = f"{code}\nimport sys\nassert not {{'torch', 'transformers', 'numpy'}} & set(sys.modules), 'heavy'"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
