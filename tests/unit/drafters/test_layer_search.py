"""The search takes away the layers that do least, and is not run twice for one model."""

from __future__ import annotations

import pytest

from foredraft import theory
from foredraft.drafters import layer_search
from foredraft.drafters.layer_search import _Judge, find_skip_layers, search
from foredraft.testing import target_for, tiny_model

NUM_LAYERS, IDLE = 6, (2, 3)


def idle_model(seed=0):
    """A model of six layers of which two add nothing."""
    model = tiny_model(seed, num_hidden_layers=NUM_LAYERS)
    for i in IDLE:
        model.model.layers[i].self_attn.o_proj.weight.zero_()
        model.model.layers[i].mlp.down_proj.weight.zero_()
    return model


@pytest.fixture
def target():
    return target_for(idle_model())


def test_layers_that_add_nothing_are_found(target, tmp_path):
    """They cost no agreement, so they go first, and both are in the answer; the slots are free again."""
    found = find_skip_layers(target, 4, tmp_path)
    assert set(IDLE) <= set(found)
    assert len(found) <= NUM_LAYERS // 2
    assert not {0, NUM_LAYERS - 1} & set(found)
    assert target.slots.num_open == 0


def test_agreement_is_that_of_drafting(target):
    """1 for idle layers, less for others; the target without any layer less is itself."""
    with _Judge(target) as judge:
        assert judge.agreement(()) == judge.agreement(IDLE) == 1.0
        assert judge.agreement((1,)) < 1.0
        assert judge.agreement(()) == 1.0, "a candidate's pass left a trace"
        assert len(judge.answers) == layer_search.NUM_SEQUENCES * layer_search.END


def test_the_set_with_the_best_forecast_is_taken(target):
    """By hand over the sets that greedy elimination passes."""
    with _Judge(target) as judge:
        found = search(judge, NUM_LAYERS, 4)
        rate = judge.agreement(found)
        best = theory.speedup(rate, 4, 1 - len(found) / NUM_LAYERS)
        for other in ((2,), (3,), (2, 3), (1, 2, 3), (2, 3, 4)):
            assert theory.speedup(judge.agreement(other), 4, 1 - len(other) / NUM_LAYERS) <= best


def test_the_answer_is_kept(target, tmp_path, monkeypatch):
    """A second load of the same model searches no more; other weights do."""
    found = find_skip_layers(target, 4, tmp_path)
    searches = []
    monkeypatch.setattr(layer_search, "search", lambda *args: searches.append(args) or (1,))
    assert find_skip_layers(target_for(idle_model()), 4, tmp_path) == found
    assert not searches
    assert find_skip_layers(target_for(idle_model(1)), 4, tmp_path) == (1,)
    assert len(searches) == 1


def test_the_budget_of_passes_is_kept(target, monkeypatch):
    """Four candidates are tried in the first round, and a second round of three would be too much."""
    monkeypatch.setattr(layer_search, "MAX_PASSES", 6)
    with _Judge(target) as judge:
        before = judge._target.num_passes
        assert len(search(judge, NUM_LAYERS, 4)) == 1
        assert judge._target.num_passes == before


@pytest.mark.parametrize("num_layers", [2, 3])
def test_small_models_can_spare_one_layer(tmp_path, num_layers):
    target = target_for(tiny_model(0, num_hidden_layers=num_layers))
    assert len(find_skip_layers(target, 4, tmp_path)) == 1
