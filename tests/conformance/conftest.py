"""Builds every drafter of the registry by its name, and combinations of them, the way an engine does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft import EngineConfig, SamplingParams, SpeculativeConfig
from foredraft.drafters import Drafter, DraftRow, make_drafter
from foredraft.heads.dflash_format import save_dflash
from foredraft.heads.eagle3_format import save_eagle3
from foredraft.heads.eagle_format import save_eagle
from foredraft.heads.medusa import save_medusa
from foredraft.heads.mlp import save_mlp
from foredraft.heads.mtp_format import save_mtp
from foredraft.heads.pard import save_pard
from foredraft.methods import METHODS
from foredraft.target.forward import TargetModel
from foredraft.testing import (
    MakeDrafter,
    RecordingDrafter,
    eagle_head,
    mlp_speculator,
    mtp_head,
    noisy_copy,
    reference,
    train_head,
    trained_dflash,
    trained_eagle3,
    trained_medusa,
    trained_pard,
)
from foredraft.testing.conformance import NUM_TOKENS, PROMPTS, conformance_models
from foredraft.testing.distribution import three_words
from foredraft.types import Draft

LONG_DRAFTS = {"suffix_decoding_max_spec_factor": 8.0}
"""The texts are short, and so are the suffixes found in them."""
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in METHODS},
    "sparse_kv": {
        "method": "sparse_kv",
        "sparse_kv_budget": 8,
        "sparse_kv_sinks": 1,
        "sparse_kv_selection": "snapkv",
    },
    "eagle3-tree": {"method": "eagle3", "tree_width": 2, "tree_depth": 3},
    "eagle3-beam": {"method": "eagle3", "tree_width": 3, "tree_depth": 3, "tree_beam": 1},
    "eagle-tree": {"method": "eagle", "tree_width": 2, "tree_depth": 3},
    "mtp-tree": {"method": "mtp", "tree_width": 2, "tree_depth": 3},
    "mlp-tree": {"method": "mlp", "tree_width": 2, "tree_depth": 3},
    "medusa-tree": {"method": "medusa", "tree_width": 2, "tree_depth": 3},
    "pard-tree": {"method": "pard", "tree_width": 2, "tree_depth": 3},
    "dflash": {"method": "dflash", "num_speculative_tokens": 8},
    "dflash-tree": {"method": "dflash", "tree_width": 3},
    "draft_model-tree": {"method": "draft_model", "tree_width": 2, "tree_depth": 3},
    "suffix": {"method": "suffix", **LONG_DRAFTS},
    "suffix-tree": {"method": "suffix", "tree_width": 3, **LONG_DRAFTS, "suffix_decoding_min_token_prob": 0.0},
}
"""Configurations to be tested: every method of the registry, and the trees of those that draft them on request."""
COMBINATIONS: dict[str, dict[str, Any]] = {
    "ngram+suffix": {"method": "ngram+suffix", **LONG_DRAFTS},
    "ngram+draft_model": {"method": "ngram+draft_model"},
    "prediction+suffix+draft_model": {"method": "prediction+suffix+draft_model", **LONG_DRAFTS},
    "suffix+recycling+lookahead": {"method": "suffix+recycling+lookahead", **LONG_DRAFTS},
    "ngram+eagle3": {"method": "ngram+eagle3"},
    "ngram+dflash": {"method": "ngram+dflash"},
    "suffix+pard-trees": {"method": "suffix+pard", "tree_width": 2, **LONG_DRAFTS},
    "ngram+eagle": {"method": "ngram+eagle"},
    "suffix+mtp-trees": {"method": "suffix+mtp", "tree_width": 2, "tree_depth": 3, **LONG_DRAFTS},
    "ngram+mlp": {"method": "ngram+mlp"},
    "suffix+eagle3-trees": {"method": "suffix+eagle3", "tree_width": 2, "tree_depth": 3, **LONG_DRAFTS},
    "suffix+draft_model-trees": {"method": "suffix+draft_model", "tree_width": 2, "tree_depth": 3, **LONG_DRAFTS},
}
"""Several sources at once: configuration alone."""


def _save_eagle3(model: Any, folder: Path) -> None:
    save_eagle3(trained_eagle3(model), folder, {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]})


def _save_medusa(model: Any, folder: Path) -> None:
    save_medusa(trained_medusa(model, num_heads=8), folder, model.config.vocab_size)


def _save_dflash(model: Any, folder: Path) -> None:
    save_dflash(trained_dflash(model), folder, {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]})


def _save_pard(model: Any, folder: Path) -> None:
    save_pard(trained_pard(noisy_copy(model, 0.05)), folder, model.config.vocab_size - 1, num_tokens=8)


def _save_eagle(model: Any, folder: Path) -> None:
    head = eagle_head(model, scale=1.0)
    train_head(head, model)
    save_eagle(head, folder, {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]})


def _save_mtp(model: Any, folder: Path) -> None:
    head = mtp_head(model, scale=1.0)
    train_head(head, model)
    save_mtp(head, folder, num_layers=2)


def _save_mlp(model: Any, folder: Path) -> None:
    speculator = mlp_speculator(model, scale=1.0, num_steps=8, tie_weights=True)
    train_head(speculator, model)
    save_mlp(speculator, folder)


HEADS: dict[str, Callable[[Any, Path], object]] = {
    "eagle3": _save_eagle3,
    "medusa": _save_medusa,
    "dflash": _save_dflash,
    "pard": _save_pard,
    "eagle": _save_eagle,
    "mtp": _save_mtp,
    "mlp": _save_mlp,
}
"""Of the methods that need a head: makes one for a target and writes it to a folder."""


class Predicting(RecordingDrafter):
    """Gives requests a prediction, as a user would: the greedy output with tokens left out, put in and replaced."""

    def __init__(self, inner: Drafter):
        super().__init__(inner)
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        model = conformance_models().target
        self.predictions = {prompt: self._edited(reference(model, prompt, greedy).token_ids) for prompt in PROMPTS}

    @staticmethod
    def _edited(output: Sequence[int]) -> tuple[int, ...]:
        return (*output[:6], 60, *output[6:10], *output[11:14], 61, *output[15:])

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return super().propose([replace(row, prediction_token_ids=self._prediction(row)) for row in rows])

    def _prediction(self, row: DraftRow) -> tuple[int, ...]:
        known = [prompt for prompt in self.predictions if tuple(row.token_ids[: len(prompt)]) == prompt]
        return self.predictions[max(known, key=len)] if known else (1, 0, 1, 2, 0, 1, 1)


def _params(names: Iterable[str]) -> list[Any]:
    """Those with heads take longer, and test_heads.py runs a choice of the tests for them."""
    return [pytest.param(name, marks=pytest.mark.slow if _has_head(name) else ()) for name in names]


def _has_head(name: str) -> bool:
    return bool(HEADS.keys() & _methods(name))


def _methods(name: str) -> set[str]:
    return set({**VARIANTS, **COMBINATIONS}[name]["method"].split("+"))


def _is_slow_head(name: str) -> bool:
    """These take minutes; tests/unit/drafters has their tokens, laws and caches in seconds."""
    return bool({"eagle", "mtp", "mlp", "pard", "dflash"} & _methods(name))


@pytest.fixture(params=_params(VARIANTS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=_params(name for name in VARIANTS if name != "none"))
def drafting(request: pytest.FixtureRequest) -> str:
    """The name of a variant that drafts."""
    return str(request.param)


@pytest.fixture(params=_params(COMBINATIONS))
def combination(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow if _is_slow_head(name) else ())
        for name in (*VARIANTS, *COMBINATIONS)
        if _has_head(name)
    ]
)
def headed(request: pytest.FixtureRequest) -> str:
    """The name of a variant or combination with a head."""
    return str(request.param)


@pytest.fixture(scope="session")
def from_registry(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., MakeDrafter]:
    """``from_registry(name)`` gives what the conformance suite takes; draft models and heads go through folders."""
    folders: dict[int, Path] = {}
    heads: dict[tuple[str, bool], Path] = {}

    def folder_of(model: Any) -> Path:
        if id(model) not in folders:
            folders[id(model)] = tmp_path_factory.mktemp("draft")
            model.save_pretrained(folders[id(model)])
        return folders[id(model)]

    def head_of(method: str, draft_model: Any) -> Path:
        """Trained for the target that goes with this draft model: the suite's, or that of three words."""
        is_suite = draft_model is conformance_models().draft
        if (method, is_suite) not in heads:
            heads[method, is_suite] = tmp_path_factory.mktemp(method)
            HEADS[method](conformance_models().target if is_suite else three_words(), heads[method, is_suite])
        return heads[method, is_suite]

    def for_method(name: str) -> MakeDrafter:
        options = {**VARIANTS, **COMBINATIONS}[name]
        methods = options["method"].split("+")

        def build(target: TargetModel, draft_model: Any) -> Drafter:
            model = {"model": str(folder_of(draft_model))} if "draft_model" in methods else {}
            for method in HEADS.keys() & methods:
                model = {"model": str(head_of(method, draft_model))}
            speculative = SpeculativeConfig(**options, **model)
            drafter = make_drafter(speculative, EngineConfig(model="tiny", dtype="float32"), target, None)
            return Predicting(drafter) if "prediction" in methods else drafter

        return build

    return for_method
