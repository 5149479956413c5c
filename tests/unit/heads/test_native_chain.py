"""Chains drafted in one native call are those that the head's modules draft step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft.drafters.base import DraftRow
from foredraft.drafters.head_cache import HeadCache
from foredraft.drafters.recurrent_head import HeadDrafter, make_head_drafter
from foredraft.heads.runner import HeadRunner
from foredraft.sampling import SamplingRow
from foredraft.testing import eagle3_config, eagle3_head, target_for
from foredraft.types import Draft, SamplingParams
from foredraft.verify.tree import path_to

TEXTS = {3: [3, 5, 7, 9, 11], 4: list(range(40, 60)), 9: [8, 1]}
GREEDY, COUPLED = SamplingParams(temperature=0), SamplingParams(temperature=0.7, seed=3)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True, "has_embeddings": True},
    {"norm_output": True, "draft_vocab_size": 64},
    {"norm_before_fc": True, "fc_norm": True},
]


def runner_for(tiny: Any, changes: dict[str, Any]) -> HeadRunner:
    config = eagle3_config(tiny, **changes)
    options = {**config.layer.to_dict(), "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    layer = type(config.layer)(**{name: value for name, value in options.items() if name != "model_type"})
    target = target_for(tiny, dtype=torch.bfloat16)
    if target.native is None:
        pytest.skip("needs AVX512-BF16 and a C++ compiler")
    return HeadRunner(eagle3_head(replace(config, layer=layer)), layer, target)


def drafter_for(runner: HeadRunner, width: int = 1) -> HeadDrafter:
    """One that has read the states of all texts; above width 1 it drafts chains with other tokens beside them."""
    head: Any = runner.head
    drafter = make_head_drafter(runner, (0, 1, 2), 64, head.token_ids, width, 4, 1)
    generator = torch.Generator().manual_seed(0)
    for sequence_id, text in TEXTS.items():
        states = torch.randn(len(text) - 1, 3, head.config.target_hidden_size, generator=generator)
        drafter.observe_features(sequence_id, text, 0, states.bfloat16())
    return drafter


def draft_row(sequence_id: int, count: int, params: SamplingParams) -> DraftRow:
    rule = "greedy" if params.is_greedy else "coupled"
    return DraftRow(sequence_id, TEXTS[sequence_id], count, 3, rule, lambda _: SamplingRow(params))


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_tokens_are_those_of_the_modules(tiny: Any, changes: dict[str, Any], num_threads: int):
    """Three rows that end after different numbers of tokens, so the call is made again for those that go on."""
    lengths, before = {3: 7, 4: 2, 9: 5}, torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = []
        for natively in (True, False):
            runner = runner_for(tiny, changes)
            assert runner.chain is not None
            if not natively:
                runner.chain = None
            rows = [draft_row(i, count, GREEDY) for i, count in lengths.items()]
            draft = drafter_for(runner).propose(rows)
            assert draft.num_draft_tokens == list(lengths.values())
            slots = runner.slots
            written = {slots.slot(i): slots.length(i) + count - 1 for i, count in lengths.items()}
            held = [store[slot, :end].clone() for store in slots.stores for slot, end in written.items()]
            found.append((draft.token_ids, held))
    finally:
        torch.set_num_threads(before)
    (tokens, held), (other_tokens, other_held) = found
    assert tokens.equal(other_tokens)
    assert len(set(tokens.flatten().tolist())) > 4, "the rows say different things"
    assert all(map(torch.equal, held, other_held))


@pytest.mark.parametrize("changes", VARIANTS)
def test_the_tokens_beside_a_chain_are_those_of_the_modules(tiny: Any, changes: dict[str, Any]):
    """Trees of three tokens at each of four places, the best nine of which are kept; of one row fewer."""
    found = []
    for natively in (True, False):
        runner = runner_for(tiny, changes)
        if not natively:
            runner.chain = None
        rows = [draft_row(i, count, GREEDY) for i, count in {3: 9, 4: 2, 9: 9}.items()]
        found.append(drafter_for(runner, width=3).propose(rows))
    draft, other = found
    assert draft.num_draft_tokens == other.num_draft_tokens == [9, 2, 9]
    assert paths(draft) == paths(other), "in any order, where two are equally likely"
    assert not all(parents == list(range(-1, 8)) for parents in draft.parents.tolist()), "there is something beside"


@pytest.mark.parametrize("width", [1, 3])
def test_with_noise_the_tokens_are_those_of_the_modules(tiny: Any, width: int):
    """Rows under the coupled rule beside a greedy one; those of the rejection rule are drawn by the modules."""
    changes, found = {"draft_vocab_size": 64} if width == 1 else {}, []
    for natively in (True, False):
        runner = runner_for(tiny, changes)
        if not natively:
            runner.chain = None
        rows = [draft_row(3, 5, COUPLED), draft_row(4, 5, GREEDY), draft_row(9, 3, COUPLED)]
        found.append(drafter_for(runner, width).propose(rows))
    draft, other = found
    assert draft.probs is None
    assert paths(draft) == paths(other)
    greedy = drafter_for(runner_for(tiny, changes), width).propose([draft_row(3, 5, GREEDY)])
    assert paths(draft)[0] != paths(greedy)[0], "the noise counts"


def paths(draft: Draft) -> list[set[tuple[int, ...]]]:
    """The tokens down to each node, of each row."""
    rows = zip(draft.token_ids.tolist(), draft.parents.tolist(), draft.num_draft_tokens, strict=True)
    return [{tuple(ids[i] for i in path_to(n, above)) for n in range(count)} for ids, above, count in rows]


def follow(cache: HeadCache, drafts: list[tuple[int, list[int]]], num_steps: int) -> list[int]:
    """The tokens of the first draft."""
    return [token for ((token, _),) in cache.follow(drafts, num_steps)[0]]


def test_rows_go_on_step_by_step_behind_a_call(tiny: Any):
    """The states that a call leaves are those that the modules read next."""
    runner = runner_for(tiny, {})
    tokens = []
    for natively in (True, False):
        cache: HeadCache = drafter_for(runner).cache
        head: Any = runner.head
        first = [int(head.token_ids[i]) for i in cache.read([(3, TEXTS[3])]).argmax(-1)]
        assert runner.chain is not None
        drafts = [(3, first)]
        if natively:
            first = [*first, *follow(cache, drafts, 2)]
            first += follow(cache, [(3, first)], 2)
        else:
            first += follow(cache, drafts, 4)
        tokens.append(first)
        for sequence_id in TEXTS:
            cache.forget(sequence_id)
    assert tokens[0] == tokens[1]


def test_a_head_without_native_kernels_has_no_such_call(tiny: Any):
    config = eagle3_config(tiny)
    assert HeadRunner(eagle3_head(config), config.layer, target_for(tiny)).chain is None
