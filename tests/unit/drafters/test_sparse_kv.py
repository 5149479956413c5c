"""What the sparse cache holds: copies of the target's entries, the right ones, at their true positions."""

from __future__ import annotations

import pytest
import torch

from foredraft.drafters.sparse_kv import OBSERVED, SparseKVDrafter, attention_scores
from foredraft.testing import RecordingDrafter, engine_for, run, target_for, tiny_model
from foredraft.types import Request, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40)
SHORT, LONG = list(range(20, 26)), [(i * i * 3 + 5 * i) % 64 for i in range(90)]


@pytest.fixture(scope="module")
def model():
    return tiny_model(0)


def entries(target, drafter, sequence_id):
    """Of the sparse slot: positions ``[n]`` of its entries in the text, per layer, head 0 and head 1."""
    full, sparse = target.slots.read(sequence_id), drafter._slots.read(sequence_id)
    found = []
    for (keys, values), (some_keys, some_values) in zip(full, sparse, strict=True):
        for head in range(keys.shape[1]):
            places = []
            for key, value in zip(some_keys[:, head], some_values[:, head], strict=True):
                hits = ((keys[:, head] == key).all(-1) & (values[:, head] == value).all(-1)).nonzero().flatten()
                assert len(hits) == 1, "an entry that is not a copy of one of the target's"
                places.append(int(hits))
            found.append(places)
    return found


def steps(model, prompt, budget, sinks, selection, k=3):
    """Decode and yield, before each pass that follows a draft, the text length and the entries."""
    target = target_for(model)
    drafter = SparseKVDrafter(target, budget, sinks, selection)
    engine = engine_for(target, drafter, num_speculative_tokens=k)
    engine.add_request(Request("a", prompt, GREEDY))
    forward, seen = target.forward, []

    def spied(rows, *wanted):
        if rows[0].num_logits > 1:
            cached = target.slots.length(rows[0].sequence_id)
            seen.append((cached, entries(target, drafter, rows[0].sequence_id)))
        return forward(rows, *wanted)

    target.forward = spied
    while engine.has_unfinished_requests:
        engine.step()
    assert len(seen) > 5
    assert drafter._slots.num_open == 0
    assert not drafter._entries
    return seen


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize(("budget", "sinks"), [(16, 4), (16, 0), (24, 2), (4, 2)])
def test_sinks_and_a_window_that_starts_anew(model, prompt, budget, sinks):
    """All of a text within the budget; then sinks and the newest, never more than the budget, always the newest one."""
    lengths = []
    for cached, heads in steps(model, prompt, budget, sinks, "window"):
        assert all(places == heads[0] for places in heads)
        places = heads[0]
        lengths.append(len(places))
        if cached <= budget:
            assert places == list(range(cached))
            continue
        window = places[sinks:]
        assert places[:sinks] == list(range(sinks))
        assert window == list(range(cached - len(window), cached))
        assert len(places) <= budget
        assert len(places) >= budget - max(1, budget // 8) - 4 - sinks
    assert max(lengths) > budget - 4


def test_a_text_within_the_budget_is_drafted_as_the_target_would(model):
    """All drafts are accepted: places and positions agree with the target's."""
    target = target_for(model)
    (sequence,) = run(engine_for(target, SparseKVDrafter(target, 64, 4, "window")), [SHORT], GREEDY)
    assert sequence.metrics.num_accepted_tokens == sequence.metrics.num_draft_tokens > 20


@pytest.mark.parametrize("selection", ["window", "snapkv"])
def test_drafts_are_those_of_transformers_over_the_same_entries(model, selection):
    """transformers' own cache of the text, cut to the entries head by head; new tokens at their true positions."""
    target = target_for(model)
    drafter = RecordingDrafter(SparseKVDrafter(target, 64, 2, selection))
    engine = engine_for(target, drafter, num_speculative_tokens=5)
    engine.add_request(Request("a", LONG, GREEDY))
    engine.step()
    engine.step()
    drafted = drafter.proposed(0)[-1]
    text = drafter.rows[-1][0].token_ids[: len(LONG) + 1]
    held = entries_before(model, LONG, 64, 2, selection)
    cache = model(input_ids=torch.tensor([LONG]), use_cache=True).cache
    for layer, heads in zip(cache.layers, (held[:2], held[2:]), strict=True):
        index = torch.tensor(heads)[None, :, :, None].expand(-1, -1, -1, 16)
        layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)
    tokens = [text[-1]]
    for i in range(5):
        place = torch.tensor([[len(LONG) + i]])
        out = model(input_ids=torch.tensor([tokens[-1:]]), position_ids=place, cache=cache, use_cache=True)
        tokens.append(int(out.logits[0, -1].argmax()))
    assert drafted == tokens[1:]


def entries_before(model, prompt, budget, sinks, selection):
    """What the slot holds for the first draft after a prompt."""
    return steps(model, prompt, budget, sinks, selection)[0][1]


def test_snapkv_keeps_what_the_prompts_end_attended_to(model):
    """Against transformers' own attention weights: per head the entries with the largest sums, smoothed."""
    budget, sinks = 64, 2
    window = 32
    out = model(input_ids=torch.tensor([LONG]), output_attentions=True, use_cache=False)
    seen = steps(model, LONG, budget, sinks, "snapkv")
    cached, heads = seen[0]
    assert cached == len(LONG)
    num_anchors = budget - window
    end = min(len(LONG) - OBSERVED, cached - window + budget // 8)
    for layer, weights in enumerate(out.attentions):
        for head in range(2):
            mine = weights[0, 2 * head : 2 * head + 2, -OBSERVED:, sinks:end]
            scores = (mine / mine.sum(-1, keepdim=True)).sum((0, 1))
            smooth = torch.nn.functional.avg_pool1d(scores[None], 5, 1, 2)[0]
            expected = sorted((smooth.topk(num_anchors - sinks).indices + sinks).tolist())
            assert heads[2 * layer + head][:num_anchors] == [*range(sinks), *expected]
    assert heads[0] != heads[1]
    for cached, heads in seen:
        newest = heads[0][num_anchors:]
        assert newest == list(range(cached - len(newest), cached))
        assert len(heads[0]) <= budget
        assert heads[0][:num_anchors] == seen[0][1][0][:num_anchors], "anchors are chosen once"


@pytest.mark.parametrize("budget", [80, 60, 44, 8])
@pytest.mark.parametrize("prompt_len", [1, 31, 33, 40, 90])
def test_no_entry_twice(model, budget, prompt_len):
    """Prompts about as long as the observation window or the budget: anchors and window never overlap."""
    for cached, heads in steps(model, LONG[:prompt_len], budget, 3, "snapkv"):
        for places in heads:
            assert places == sorted(set(places))
            assert len(places) <= budget
            assert places[-1:] == [cached - 1][:cached]


def test_scores_are_attention_summed_over_heads_and_queries():
    """Two query heads on one key head; by hand over five entries, neighbours averaged with zeros outside."""
    query = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    keys = torch.tensor([[[2.0, 0.0]], [[0.0, 1.0]], [[0.0, 0.0]], [[0.0, 0.0]], [[0.0, 3.0]]])
    plain = torch.softmax(keys[:, 0, 0], 0) + torch.softmax(keys[:, 0, 1], 0)
    expected = [float(plain[max(0, i - 2) : i + 3].sum() / 5) for i in range(5)]
    assert attention_scores(query, keys)[:, 0].tolist() == pytest.approx(expected, rel=1e-5)
