"""Token-by-token rejection: values by hand, ragged rows, independence of the neighbours, extreme inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foredraft.verify import block, rejection

TARGET = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]])
DRAFT = torch.tensor([[[0.2, 0.6, 0.2]]])
ONE = torch.tensor([1])


def random_batch(num_rows: int, num_positions: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    target = torch.rand(num_rows, num_positions + 1, vocab_size, generator=generator, dtype=dtype)
    draft = torch.rand(num_rows, num_positions, vocab_size, generator=generator, dtype=dtype)
    target[target < 0.3], draft[draft < 0.3] = 0.0, 0.0
    ids = torch.multinomial(draft.flatten(0, 1).float(), 1, generator=generator).reshape(num_rows, num_positions)
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    # Much mass on the drafted token, so that each rule both accepts and rejects.
    drafted = torch.nn.functional.one_hot(ids, vocab_size)
    target[:, :-1], draft = 0.5 * target[:, :-1] + 0.5 * drafted, 0.2 * draft + 0.8 * drafted
    num_draft_tokens = torch.arange(num_rows) % (num_positions + 1)
    uniforms = torch.rand(num_rows, num_positions, generator=generator, dtype=torch.float64)
    return ids, num_draft_tokens, target, draft, uniforms


def test_by_hand() -> None:
    accept = rejection.accept_probs(torch.tensor([[1]]), ONE, TARGET, DRAFT)
    assert torch.allclose(accept, torch.tensor([[0.5]]))
    assert rejection.count_accepted(accept, torch.tensor([[0.49]])).tolist() == [1]
    assert rejection.count_accepted(accept, torch.tensor([[0.51]])).tolist() == [0]
    residual = rejection.next_token_probs(torch.tensor([[1]]), ONE, TARGET, DRAFT, torch.tensor([0]))
    assert torch.allclose(residual, torch.tensor([[1.0, 0.0, 0.0]]))
    bonus = rejection.next_token_probs(torch.tensor([[1]]), ONE, TARGET, DRAFT, ONE)
    assert torch.equal(bonus, TARGET[:, 1])


def test_deterministic_by_hand() -> None:
    accept = rejection.accept_probs(torch.tensor([[1]]), ONE, TARGET, None)
    assert torch.allclose(accept, torch.tensor([[0.3]]))
    residual = rejection.next_token_probs(torch.tensor([[1]]), ONE, TARGET, None, torch.tensor([0]))
    assert torch.allclose(residual, torch.tensor([[5 / 7, 0.0, 2 / 7]]))


def test_count_stops_at_the_first_rejection() -> None:
    """A pass behind a rejection does not count (vllm#10604)."""
    accept = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]])
    uniforms = torch.tensor([[0.1, 0.9, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1], [0.9, 0.1, 0.1, 0.1]])
    assert rejection.count_accepted(accept, uniforms).tolist() == [1, 4, 0]


def test_residual_falls_back_to_the_target_where_it_vanishes() -> None:
    """Equal laws, where rounding made the ratio fall below 1: no division by zero, no nan."""
    target = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    residual = rejection.next_token_probs(torch.tensor([[0]]), ONE, target, target[:, :1], torch.tensor([0]))
    assert torch.equal(residual, target[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_ragged_rows_equal_their_run_alone_bit_for_bit(dtype: torch.dtype, rule: str, deterministic: bool) -> None:
    """Rows of 0 to 4 draft tokens in a batch, padded with nan, against each alone without padding."""
    ids, num, target, draft, uniforms = random_batch(15, 4, 257, dtype)
    for row, length in enumerate(num.tolist()):
        ids[row, length:], target[row, length + 1 :], draft[row, length:] = -1, float("nan"), float("nan")
    originals = [tensor.clone() for tensor in (ids, num, target, draft, uniforms)]

    def run(select: slice, length: int) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (
            ids[select, :length],
            num[select],
            target[select, : length + 1],
            None if deterministic else draft[select, :length],
        )
        module = {"rejection": rejection, "block": block}[rule]
        probs = rejection.accept_probs(*inputs) if rule == "rejection" else block.stop_probs(*inputs)
        counts = module.count_accepted(probs, uniforms[select, :length])
        return probs, counts, module.next_token_probs(*inputs, counts)

    probs, counts, next_probs = run(slice(None), 4)
    assert probs.dtype == next_probs.dtype == dtype
    assert (counts > 0).any()
    assert (counts < num).any()
    assert (counts <= num).all()
    for row, length in enumerate(num.tolist()):
        alone_probs, alone_counts, alone_next = run(slice(row, row + 1), length)
        assert torch.equal(probs[row, :length], alone_probs[0])
        assert not probs[row, length:].any()
        assert counts[row] == alone_counts[0]
        assert torch.equal(next_probs[row], alone_next[0])
        assert next_probs[row].sum().item() == pytest.approx(1.0, abs=1e-5)
    for before, after in zip(originals, (ids, num, target, draft, uniforms), strict=True):
        assert torch.equal(before.nan_to_num(-7.0), after.nan_to_num(-7.0)), "an argument was modified"


@pytest.mark.parametrize("rule", [rejection, block])
def test_no_draft_tokens_at_all(rule: object) -> None:
    """A batch padded to width 0: every row is its bonus row."""
    ids, num = torch.zeros(1, 0, dtype=torch.int64), torch.tensor([0])
    for draft in (None, DRAFT[:, :0]):
        inputs = (ids, num, TARGET[:, :1], draft)
        probs = rejection.accept_probs(*inputs) if rule is rejection else block.stop_probs(*inputs)
        assert probs.shape == (1, 0)
        counts = rule.count_accepted(probs, torch.zeros(1, 0))  # type: ignore[attr-defined]
        assert counts.tolist() == [0]
        next_probs = rule.next_token_probs(*inputs, counts)  # type: ignore[attr-defined]
        assert torch.equal(next_probs, TARGET[:, 0])


@pytest.mark.parametrize("rule", [rejection, block])
def test_impossible_and_subnormal_draft_probabilities(rule: object) -> None:
    """Draft probability 0: never accepted. A subnormal one: the ratio overflows, the result does not."""
    tiny = 1e-45
    draft = torch.tensor([[[1.0, 0.0, tiny], [1.0, 0.0, tiny]]])
    target = torch.tensor([[[0.2, 0.4, 0.4], [0.2, 0.4, 0.4], [0.2, 0.4, 0.4]]])
    assert draft[0, 0, 2] > 0
    for ids, expected in (([1, 2], [0.0, 0.0]), ([2, 2], [1.0, 1.0])):
        inputs = (torch.tensor([ids]), torch.tensor([2]), target, draft)
        probs = rejection.accept_probs(*inputs) if rule is rejection else block.stop_probs(*inputs)
        assert not probs.isnan().any()
        assert probs[0, 0] == expected[0]
        if rule is block:
            assert probs[0, 1] == expected[1]


def test_row_sums_do_not_depend_on_the_batch() -> None:
    """torch's own sum does not promise this: it splits the work by shape."""
    values = torch.rand(7, 49152, generator=torch.Generator().manual_seed(0))
    together = rejection.row_sums(values)
    assert together.dtype == torch.float32
    for row in range(7):
        assert torch.equal(together[row], rejection.row_sums(values[row : row + 1])[0])
        assert together[row].item() == pytest.approx(values[row].double().sum().item(), rel=1e-7)
