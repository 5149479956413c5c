"""Builds every drafter of the registry by its name, the way an engine does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft import EngineConfig, SpeculativeConfig
from foredraft.drafters import DRAFTERS, Drafter, make_drafter
from foredraft.errors import InvalidOptionError
from foredraft.target.forward import TargetModel
from foredraft.testing import MakeDrafter

VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in DRAFTERS},
    "draft_model-tree": {"method": "draft_model", "tree_width": 2, "tree_depth": 3},
}
"""Configurations to be tested: every method of the registry, and the trees of those that draft them on request."""


@pytest.fixture(params=VARIANTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[name for name in VARIANTS if name != "none"])
def drafting(request: pytest.FixtureRequest) -> str:
    """The name of a variant that drafts."""
    return str(request.param)


@pytest.fixture(scope="session")
def from_registry(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., MakeDrafter]:
    """``from_registry(name)`` gives what the conformance suite takes; a draft model goes through a folder."""
    folders: dict[int, Path] = {}

    def folder_of(model: Any) -> Path:
        if id(model) not in folders:
            folders[id(model)] = tmp_path_factory.mktemp("draft")
            model.save_pretrained(folders[id(model)])
        return folders[id(model)]

    def for_method(name: str) -> MakeDrafter:
        def build(target: TargetModel, draft_model: Any) -> Drafter:
            try:
                speculative = SpeculativeConfig(**VARIANTS[name])
            except InvalidOptionError:
                speculative = SpeculativeConfig(**VARIANTS[name], model=str(folder_of(draft_model)))
            return make_drafter(speculative, EngineConfig(model="tiny", dtype="float32"), target, None)

        return build

    return for_method
