"""PARD in the engine: what it drafts is what the model says behind text and masks; no mask stays in its cache."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import EngineConfig, SamplingParams, SpeculativeConfig
from foredraft.drafters import make_drafter
from foredraft.drafters.pard import PardDrafter, PardTreeDrafter
from foredraft.engine import Engine
from foredraft.errors import IncompatibleDrafterError, ModelLoadError
from foredraft.heads.pard import save_pard
from foredraft.sampling import probs_from_logits
from foredraft.testing import (
    RecordingDrafter,
    check_caches,
    engine_for,
    noisy_copy,
    reference,
    run,
    target_for,
    tiny_mamba,
)
from foredraft.types import Draft
from foredraft.verify.tree import path_to

PROMPTS = ([7, 8, 9], [5, *range(20, 60)], [3, 5, 3, 5, 3], [11])
GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
MASK = 63

pytestmark = pytest.mark.filterwarnings("ignore:no tokenizer to compare draft model")


@pytest.fixture(scope="module")
def model(tiny: Any) -> Any:
    """It knows what the target says next, and nothing of masks."""
    return noisy_copy(tiny)


def engine_of(tiny: Any, model: Any, width: int = 1, places: int = 4, **options: Any) -> Engine:
    draft, size = target_for(model), tiny.config.vocab_size
    drafter = (
        PardDrafter(draft, size, MASK, places) if width == 1 else PardTreeDrafter(draft, size, MASK, places, width)
    )
    return engine_for(tiny, RecordingDrafter(drafter), **{"num_speculative_tokens": 4, **options})


def said(model: Any, text: list[int], count: int) -> torch.Tensor:
    """Logits ``[count, V]`` of the next places by one plain pass."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([text + [MASK] * (count - 1)])).logits[0, len(text) - 1 :]
    return logits


def drafts_of(engine: Engine) -> list[tuple[list[int], list[int], list[int], Draft, int]]:
    """Text, tokens, parents, draft and row of every draft that was made."""
    recorder, found = engine.drafter, []
    assert isinstance(recorder, RecordingDrafter)
    for texts, draft in zip(recorder.texts, recorder.drafts, strict=True):
        for i, (text, count) in enumerate(zip(texts, draft.num_draft_tokens, strict=True)):
            if count:
                found.append((text, draft.token_ids[i, :count].tolist(), draft.parents[i, :count].tolist(), draft, i))
    return found


def test_drafts_are_what_the_model_says_behind_masks(tiny: Any, model: Any):
    """Ragged rows, rejections and steps at the end; after each step the cache holds true tokens only."""
    engine = engine_of(tiny, model)
    sequences = run(engine, PROMPTS, GREEDY, after_step=lambda engine, _: check_caches(engine))
    assert [s.output_token_ids for s in sequences] == [reference(tiny, p, GREEDY).token_ids for p in PROMPTS]
    drafts = drafts_of(engine)
    for text, tokens, _, _, _ in drafts:
        assert said(model, text, len(tokens)).argmax(-1).tolist() == tokens
    assert len(drafts) > 20
    assert {len(tokens) for _, tokens, _, _, _ in drafts} >= {1, 4}
    accepted, total = (sum(getattr(s.metrics, f"num_{n}_tokens") for s in sequences) for n in ("accepted", "draft"))
    assert 0 < accepted < total
    assert not engine.drafter.inner.model.slots.num_open  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [1, 2])
def test_laws_are_those_that_tokens_were_drawn_from(tiny: Any, model: Any, width: int):
    """Each place has the law that the model gives it behind the text, whatever was drawn before it."""
    params = [SamplingParams(top_k=6, max_tokens=10, seed=i) for i in range(len(PROMPTS))]
    engine = engine_of(tiny, model, width, acceptance_rule="rejection", num_speculative_tokens=6)
    run(engine, PROMPTS, params)
    deepest = 0
    for text, tokens, parents, draft, row in drafts_of(engine):
        assert draft.probs is not None
        paths = [path_to(node, parents) for node in range(len(tokens))]
        laws = probs_from_logits(said(model, text, max(map(len, paths))), [params[0]] * max(map(len, paths)))
        for node, path in enumerate(paths):
            law = laws[len(path) - 1].clone()
            earlier = [other for other in range(node) if parents[other] == parents[node]]
            law[[tokens[other] for other in earlier]] = 0.0  # siblings are drawn without replacement
            assert torch.allclose(draft.probs[row, node], law / law.sum(), atol=1e-5)
            assert law[tokens[node]] > 0
            deepest = max(deepest, len(path))
    assert deepest >= 2


def test_a_tree_has_the_most_probable_paths(tiny: Any, model: Any):
    """Of all paths of three places, three tokens each, those with the highest products (DDTree)."""
    width = 3
    engine = engine_of(tiny, model, width, places=3, num_speculative_tokens=7)
    sequences = run(engine, PROMPTS, GREEDY, after_step=lambda engine, _: check_caches(engine))
    assert [s.output_token_ids for s in sequences] == [reference(tiny, p, GREEDY).token_ids for p in PROMPTS]
    branched = 0
    for text, tokens, parents, _, _ in drafts_of(engine):
        paths = [tuple(tokens[i] for i in path_to(node, parents)) for node in range(len(tokens))]
        best = torch.softmax(said(model, text, 3), -1).topk(width)
        by_place = [
            dict(zip(i, p, strict=True)) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        depth = max(map(len, paths))
        products = {
            path: float(torch.tensor([by_place[j][t] for j, t in enumerate(path)], dtype=torch.float64).prod())
            for length in range(1, depth + 1)
            for path in itertools.product(*by_place[:length])
        }
        wanted = sorted(products.values(), reverse=True)[: len(paths)]
        assert sorted((products[path] for path in paths), reverse=True) == pytest.approx(wanted, rel=1e-4)
        branched += len(paths) > depth
    assert branched > 5


def build(tiny: Any, model: Any, tmp_path: Path, num_tokens: int, **options: Any) -> Any:
    save_pard(model, tmp_path, MASK, num_tokens)
    config = SpeculativeConfig(method="pard", model=str(tmp_path), **options)
    return make_drafter(config, EngineConfig(model="tiny", dtype="float32"), target_for(tiny), None)


def test_built_by_name(tiny: Any, model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Not further than it was trained to look: that is said, and the default keeps to it."""
    with caplog.at_level(logging.WARNING):
        drafter = build(tiny, model, tmp_path, 3, num_speculative_tokens=5)
        assert "num_speculative_tokens=5 is above the 3 tokens that" in caplog.text
        caplog.clear()
        assert build(tiny, model, tmp_path, 3).num_places == 3
        assert "is above" not in caplog.text
        tree = build(tiny, model, tmp_path, 3, tree_width=2, tree_depth=4, num_speculative_tokens=9)
        assert "tree_depth=4 is above the 3 tokens that" in caplog.text
    assert (tree.depth, tree.makes_trees, tree.max_passes, tree.cost) == (3, True, 1, 1.0)
    engine = engine_for(tiny, RecordingDrafter(drafter), num_speculative_tokens=5)
    (sequence,) = run(engine, [PROMPTS[0]], GREEDY)
    assert sequence.output_token_ids == reference(tiny, PROMPTS[0], GREEDY).token_ids
    assert max(len(tokens) for _, tokens, _, _, _ in drafts_of(engine)) == 3


def test_what_is_refused(tiny: Any, tmp_path: Path):
    tiny.save_pretrained(tmp_path)
    config = SpeculativeConfig(method="pard", model=str(tmp_path))
    with pytest.raises(ModelLoadError, match="is no parallel draft model"):
        make_drafter(config, EngineConfig(model="tiny", dtype="float32"), target_for(tiny), None)
    with pytest.raises(IncompatibleDrafterError, match="Mamba2.*keeps a state that cannot be cut"):
        PardDrafter(target_for(tiny_mamba(), packed=False), 64, MASK, 4)
