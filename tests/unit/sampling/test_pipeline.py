"""The pipeline: order of the filters, hypothetical prefixes, rows that do not see their neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.errors import RequestError
from foredraft.sampling import (
    SamplingRow,
    TokenCounts,
    adjust_logits,
    check_token_ids,
    filters,
    needs_counts,
    probs_from_logits,
)
from foredraft.types import SamplingParams

INF = float("inf")


def probs_of(logits: Tensor, *params: SamplingParams) -> Tensor:
    return probs_from_logits(adjust_logits(logits, [SamplingRow(param) for param in params]), params)


def test_nothing_asked_is_one_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """No filter is called, and the logits are not even copied."""

    def fail(*_: object) -> None:
        raise AssertionError("a filter was called")

    for name in vars(filters):
        if name.startswith(("apply_", "keep_", "ban_", "add_")):
            monkeypatch.setattr(filters, name, fail)
    logits = torch.randn(3, 50)
    rows = [SamplingRow(SamplingParams())] * 3
    assert adjust_logits(logits, rows) is logits
    assert torch.equal(probs_from_logits(logits, [row.params for row in rows]), logits.softmax(dim=-1))
    with pytest.raises(AssertionError, match="a filter was called"):
        probs_of(logits[:1], SamplingParams(top_k=3))


def test_bf16_logits_are_cast_before_anything_else() -> None:
    """A softmax in bf16 would not be the law that is drawn from (DeepSpec issue 31)."""
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    params = SamplingParams(temperature=0.7, top_k=20)
    probs = probs_of(logits, params, params)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, probs_of(logits.float(), params, params))


def test_greedy_row_is_one_hot_of_the_adjusted_argmax() -> None:
    logits = torch.tensor([[1.0, 5.0, 4.0, 4.0], [1.0, 5.0, 4.0, 4.0]])
    params = (
        SamplingParams(temperature=0, banned_token_ids=(1,)),
        SamplingParams(temperature=0, top_k=2, top_p=0.1),
    )
    assert probs_of(logits, *params).tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [0, 0], [1, 1]])
def test_case_o12_greedy_beside_sampling(order: list[int]) -> None:
    """Row 0 greedy, row 1 temperature 0.8 and top-k 3: each as alone, whatever stands beside it."""
    logits = torch.zeros(12)
    logits[[9, 4, 7]] = torch.tensor([5.0, 4.0, 3.0])
    kinds = [SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_k=3)]
    probs = probs_of(logits.expand(2, -1), *(kinds[kind] for kind in order))
    for row, kind in zip(probs, order, strict=True):
        assert row.nonzero().squeeze(-1).tolist() == ([9] if kind == 0 else [4, 7, 9])


@pytest.mark.parametrize("params", [SamplingParams(min_p=0.3), SamplingParams(top_k=2), SamplingParams(top_p=0.8)])
def test_case_o07_every_filter_reaches_the_probabilities(params: SamplingParams) -> None:
    """vllm#42802: p = (.60, .25, .10, .05); only tokens 0 and 1 stay, with .7059 and .2941."""
    probs = probs_of(torch.tensor([[0.60, 0.25, 0.10, 0.05]]).log(), params)[0]
    assert probs.tolist() == pytest.approx([0.7059, 0.2941, 0.0, 0.0], abs=1e-4)


def test_case_o10_and_o11() -> None:
    target = torch.tensor([[0.3, 0.4, 0.2, 0.1]]).log()
    assert probs_of(target, SamplingParams(top_k=2))[0].tolist() == pytest.approx([3 / 7, 4 / 7, 0, 0])
    other = torch.tensor([[0.50, 0.30, 0.15, 0.05]]).log()
    probs = probs_of(other, SamplingParams(temperature=0.5, top_p=0.9))[0]
    assert probs.tolist() == pytest.approx([0.7353, 0.2647, 0, 0], abs=1e-4)


def test_order_min_p_top_k_top_p() -> None:
    """temperature before min-p; top-p of what top-k left: by hand, each order gives another set."""
    probs = torch.tensor([[0.40, 0.25, 0.20, 0.10, 0.05]])
    # T = 0.5 squares to .16, .0625, .04: min-p 0.3 keeps two; before the temperature it keeps three.
    assert (probs_of(probs.log(), SamplingParams(temperature=0.5, min_p=0.3)) > 0).sum() == 2
    assert (probs_of(probs.log(), SamplingParams(min_p=0.3)) > 0).sum() == 3
    # top-k 2 leaves .615 and .385, so top-p .6 keeps one; alone it keeps two.
    assert (probs_of(probs.log(), SamplingParams(top_k=2, top_p=0.6)) > 0).sum() == 1
    assert (probs_of(probs.log(), SamplingParams(top_p=0.6)) > 0).sum() == 2


def test_penalties_come_after_the_bias() -> None:
    """(-1 + 3) / 4 = 0.5; the other order would give -1 * 4 + 3 = -1."""
    params = SamplingParams(logit_bias={0: 3.0}, repetition_penalty=4.0)
    row = SamplingRow(params, counts=TokenCounts([0]))
    assert adjust_logits(torch.tensor([[-1.0, 0.25]]), [row]).tolist() == [[0.5, 0.25]]


def test_allowed_and_banned() -> None:
    params = SamplingParams(allowed_token_ids=(0, 1, 2), banned_token_ids=(1,), logit_bias={1: 9.0, 3: 9.0})
    adjusted = adjust_logits(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), [SamplingRow(params)])
    assert adjusted.tolist() == [[1.0, -INF, 3.0, -INF]]


def test_repetition_counts_the_prompt_the_others_do_not() -> None:
    logits = torch.tensor([[2.0, 2.0, 2.0, -2.0]])
    counts = TokenCounts([0, 0, 3])
    counts.append([1, 1, 3])
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    adjusted = adjust_logits(logits, [SamplingRow(params, counts=counts)])
    assert adjusted.tolist() == [[1.0, 1.0 - 0.5 - 0.5, 2.0, -4.0 - 0.25 - 0.5]]


def test_case_o06_each_row_counts_its_own_hypothetical_prefix() -> None:
    """Greedy with frequency penalty 0.31, logits 2.0 and 1.5: 3,3,4,3,4,3,... for any draft.

    Rows of one pass, drafted 3s: the prefix decides; the committed counts are not touched by looking ahead.
    """
    params = SamplingParams(temperature=0, frequency_penalty=0.31)
    logits = torch.full((4, 5), -10.0)
    logits[:, 3], logits[:, 4] = 2.0, 1.5
    counts = TokenCounts([4, 4, 4])
    emitted: list[int] = []
    accepted_lengths = set()
    while len(emitted) < 16:
        rows = [
            SamplingRow(params, num_output_tokens=len(emitted) + i, counts=counts, draft_prefix=(3,) * i)
            for i in range(4)
        ]
        before = counts.output_counts()
        tokens = adjust_logits(logits, rows).argmax(dim=-1).tolist()
        assert counts.output_counts() == before
        length = next((i for i, token in enumerate(tokens[:3]) if token != 3), 3)
        accepted_lengths.add(length)
        counts.append(tokens[: length + 1])
        emitted += tokens[: length + 1]
    assert emitted[:16] == [3, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3]
    assert len(accepted_lengths) > 1


def test_case_o08_minimum_length_along_the_draft() -> None:
    """min_tokens 4: the end token is banned in the rows for places 1 to 4 and allowed from place 5 on."""
    params = SamplingParams(temperature=0, min_tokens=4, max_tokens=10)
    logits = torch.tensor([[0.0, 0.0, 5.0, 4.0]]).expand(6, -1)
    rows = [SamplingRow(params, num_output_tokens=i, draft_prefix=(3,) * i, stop_ids=(2,)) for i in range(6)]
    assert adjust_logits(logits, rows).argmax(dim=-1).tolist() == [3, 3, 3, 3, 2, 2]


def test_minimum_length_beside_another_option() -> None:
    """The end token is banned in the last row before min_tokens, and not in the first after it."""
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=10, logit_bias={0: 1.0})
    rows = [SamplingRow(params, num_output_tokens=count, stop_ids=(2,)) for count in (1, 2)]
    adjusted = adjust_logits(torch.tensor([[0.0, 0.0, 5.0]]).expand(2, -1), rows)
    assert adjusted.tolist() == [[1.0, 0.0, -INF], [1.0, 0.0, 5.0]]


def test_needs_counts() -> None:
    assert not needs_counts(SamplingParams(logit_bias={1: 2.0}, top_k=5))
    for option in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert needs_counts(SamplingParams.from_options({option: 0.5}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": (3, 50)}, "allowed_token_ids has token id 50; the vocabulary ends at 49"),
        ({"banned_token_ids": (-1,)}, "banned_token_ids has token id -1"),
        ({"logit_bias": {99: 1.0}}, "logit_bias has token id 99"),
        ({"logit_bias": {9: INF}}, "logit_bias of token 9 is inf"),
        ({"stop_token_ids": (50,)}, "stop_token_ids has token id 50"),
        ({"allowed_token_ids": (1, 2), "banned_token_ids": (2, 1)}, "no token can be emitted"),
        ({"allowed_token_ids": (2,), "min_tokens": 1}, "no token can be emitted"),
    ],
)
def test_check_token_ids(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_token_ids(SamplingParams.from_options(options), stop_ids=(2,), vocab_size=50)


def test_check_token_ids_accepts() -> None:
    check_token_ids(SamplingParams(allowed_token_ids=(2, 3), min_tokens=1), stop_ids=(2,), vocab_size=50)
    check_token_ids(SamplingParams(allowed_token_ids=(2,)), stop_ids=(2,), vocab_size=50)


VOCAB_SIZE = 333

any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.0]),
    top_k=st.sampled_from([0, -1, 1, 7, 80, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.2, 0.9, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3]),
    logit_bias=st.sampled_from([None, {5: 2.0, 8: -3.0}]),
    allowed_token_ids=st.sampled_from([None, None, (1, 5, 8, 300)]),
    banned_token_ids=st.sampled_from([None, None, (5, 7)]),
    min_tokens=st.sampled_from([0, 3]),
)


@settings(max_examples=150, deadline=None)
@given(params=st.lists(any_params, min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_a_row_is_bit_identical_whatever_its_neighbours_ask(params: list[SamplingParams], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), VOCAB_SIZE, generator=generator) * 3
    before = logits.clone()
    rows = []
    for index, param in enumerate(params):
        counts = TokenCounts([1, 2, 300]) if needs_counts(param) else None
        if counts is not None:
            counts.append([5, 5, 9])
        rows.append(
            SamplingRow(param, num_output_tokens=index, counts=counts, draft_prefix=(8,) * index, stop_ids=(0,))
        )
    adjusted = adjust_logits(logits, rows)
    probs = probs_from_logits(adjusted, params)
    assert torch.equal(logits, before)
    assert torch.allclose(probs.sum(dim=-1), torch.ones(len(params)), atol=1e-5)
    for index, row in enumerate(rows):
        alone = adjust_logits(logits[index : index + 1], [row])
        assert torch.equal(alone[0], adjusted[index])
        assert torch.equal(probs_from_logits(alone, [row.params])[0], probs[index])


def test_softmax_of_a_row_does_not_depend_on_the_batch() -> None:
    """The plain path is one softmax over the batch: its rows at the real vocabulary size, any offset."""
    logits = torch.randn(9, 49_153, generator=torch.Generator().manual_seed(0)) * 4
    together = probs_of(logits, *[SamplingParams()] * 9)
    mixed = probs_of(logits, *[SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=9)] * 3)
    for row in range(9):
        assert torch.equal(probs_of(logits[row : row + 1].clone(), SamplingParams())[0], together[row])
    for row in (0, 3, 6):
        assert torch.equal(mixed[row], together[row])


def test_missing_counts_are_noticed() -> None:
    with pytest.raises(AssertionError, match="TokenCounts"):
        adjust_logits(torch.zeros(1, 4), [SamplingRow(SamplingParams(presence_penalty=1.0))])
