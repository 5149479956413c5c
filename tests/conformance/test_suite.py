"""The suite convicts drafters with the faults that it is there for, and `check_drafter` passes one without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foredraft.drafters import Drafter, DraftRow
from foredraft.drafters.base import chain_draft
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.ngram import NGramDrafter, NGramIndex
from foredraft.sampling import Stream, round_position, sample_inverse_cdf, uniform
from foredraft.target.forward import TargetModel
from foredraft.testing import (
    MakeDrafter,
    Totals,
    check_distribution,
    check_drafter,
    check_interface,
    check_tokens,
    target_for,
)
from foredraft.types import Draft


def ngram(target: TargetModel, _: Any) -> Drafter:
    return NGramDrafter(1, 4)


class OneTooMany(NGramDrafter):
    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        draft = super().propose(rows)
        asked = zip(draft.token_ids.tolist(), draft.num_draft_tokens, strict=True)
        return chain_draft([[*tokens[:count], 1] for tokens, count in asked])


class Editor(NGramDrafter):
    """Writes its draft into the sequence."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        draft = super().propose(rows)
        rows[0].token_ids.append(0)
        return draft


class LongMemory(Drafter):
    """One index for all requests, which never forgets."""

    def __init__(self) -> None:
        self.index: dict[str, NGramIndex] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        drafts = []
        for row in rows:
            index = self.index.setdefault(str(row.sequence_id), NGramIndex(1, 4))
            index.extend(row.token_ids)
            drafts.append(index.continuation(row.num_draft_tokens)[0] if row.num_draft_tokens else [])
        return chain_draft(drafts)


class Neighbourly(NGramDrafter):
    """Every row is drafted from the text of the first one."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        draft = super().propose(rows[:1])
        tokens = draft.token_ids[0, : draft.num_draft_tokens[0]].tolist()
        return chain_draft([tokens[: row.num_draft_tokens] for row in rows])


class NoRollback(DraftModelDrafter):
    """Keeps rejected tokens in its cache."""

    def observe(self, sequence_id: int, token_ids: list[int]) -> None:
        self._agreed[sequence_id] = 0


class Silent(Drafter):
    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return chain_draft([[] for _ in rows])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda target, model: OneTooMany(1, 4), "draft tokens, [0-9] were asked for"),
        (lambda target, model: Editor(1, 4), "the drafter changed the text of a sequence"),
    ],
)
def test_faults_that_every_step_shows(make: MakeDrafter, message: str):
    with pytest.raises(AssertionError, match=message):
        check_tokens(make, "auto", "greedy", 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda target, model: LongMemory(), "keeps state of requests that have ended"),
        (lambda target, model: Neighbourly(1, 4), "drafts depend on earlier requests, or on the order of rows"),
        (lambda target, model: NoRollback(target_for(model), 64), "tokens cached of a text of|not those of the text"),
    ],
)
def test_faults_of_state(make: MakeDrafter, message: str):
    with pytest.raises(AssertionError, match=message):
        check_interface(make)


class TableDrafter(Drafter):
    """Draws one token from a fixed law, whatever the text, and reports ``reported`` as that law."""

    stochastic = True
    law = torch.tensor([0.1, 0.6, 0.3] + [0.0] * 61)

    def __init__(self, stream: Stream = Stream.DRAFT, reported: torch.Tensor | None = None, peeks: bool = False):
        self._stream, self._peeks = stream, peeks
        self._reported = self.law if reported is None else reported

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        tokens: list[list[int]] = []
        for row in rows:
            key = round_position(len(row.token_ids), 0)
            number = uniform(row.noise_seed, self._stream, key)
            drawn = int(sample_inverse_cdf(self.law[None], torch.tensor([number], dtype=torch.float64)))
            dropped = self._peeks and drawn == 2
            tokens.append([drawn] if row.num_draft_tokens and not dropped else [])
        width = max(map(len, tokens))
        return chain_draft(tokens, self._reported.expand(len(rows), width, -1))


def test_a_drawn_draft_that_says_what_it_was_drawn_from_is_exact():
    """The honest twin of the three that follow."""
    rate = check_distribution(lambda target, model: TableDrafter(), "rejection", num_texts=2500)
    assert 0.2 < rate < 0.8


@pytest.mark.parametrize(
    "make",
    [
        lambda target, model: TableDrafter(reported=torch.tensor([1 / 3] * 3 + [0.0] * 61)),
        lambda target, model: TableDrafter(stream=Stream.ACCEPT),
        lambda target, model: TableDrafter(peeks=True),
    ],
    ids=["reports another law", "draws with the numbers of acceptance", "drops a token after seeing it"],
)
def test_faults_of_the_distribution(make: MakeDrafter):
    with pytest.raises(AssertionError, match="chi-square|total variation"):
        check_distribution(make, "rejection", num_texts=2500)


def test_a_drafter_that_never_drafts_tests_nothing():
    totals = Totals()
    check_tokens(lambda target, model: Silent(), "auto", "greedy", 4, totals=totals)
    with pytest.raises(AssertionError, match="nothing was put to the test"):
        totals.check_not_vacuous()


@pytest.mark.slow
def test_check_drafter_passes_one_without_fault():
    """The whole suite as a user calls it."""
    check_drafter(ngram)
    check_drafter(lambda target, model: Silent(), drafts=False)
