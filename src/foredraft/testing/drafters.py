"""Drafters that do as they are told, and one that writes down what another does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from foredraft.drafters import Drafter, DraftRow, JudgedDraft
from foredraft.drafters.base import chain_draft
from foredraft.types import Draft


class ScriptedDrafter(Drafter):
    """Proposes what a function of the committed text says, cut to the length that was asked for.

    Args:
        script: the tokens to propose after a text, or a list that is proposed at every step.
    """

    def __init__(self, script: Callable[[list[int]], Sequence[int]] | Sequence[int]):
        self._script = script if callable(script) else lambda _: script

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return chain_draft([list(self._script(list(r.token_ids)))[: r.num_draft_tokens] for r in rows])


class OracleDrafter(ScriptedDrafter):
    """Knows the continuation; proposes so many right tokens and then wrong ones.

    Args:
        texts: prompts with their continuations; a sequence follows the text that it is a prefix of.
        num_right: right tokens of each draft; None is all of them, a function sees the text's length.
        vocab_size: a wrong token is the right one plus 1, modulo this.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        vocab_size: int,
        num_right: int | Callable[[int], int] | None = None,
    ):
        self._texts = [list(text) for text in texts]
        self._vocab_size, self._num_right = vocab_size, num_right
        super().__init__(self._continue)

    def _continue(self, token_ids: list[int]) -> list[int]:
        known = (text for text in self._texts if text[: len(token_ids)] == token_ids)
        following = next(known, [])[len(token_ids) :]
        right = self._num_right(len(token_ids)) if callable(self._num_right) else self._num_right
        if right is None:
            return following
        return following[:right] + [(token + 1) % self._vocab_size for token in following[right:]]


class RecordingDrafter(Drafter):
    """Passes everything on to another drafter, keeps what it was asked and what it proposed.

    Asserts that the other one leaves the texts alone that it is given.

    Attributes:
        rows: per step, what the drafter was given.
        texts: per step, the texts of its rows as they were then.
        drafts: per step, what it proposed.
    """

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.makes_trees = inner.makes_trees
        self.num_top_tokens = inner.num_top_tokens
        self.feature_layers = inner.feature_layers
        self.rows: list[list[DraftRow]] = []
        self.texts: list[list[list[int]]] = []
        self.drafts: list[Draft] = []

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        before = [list(row.token_ids) for row in rows]
        draft = self.inner.propose(rows)
        assert [row.token_ids for row in rows] == before, "the drafter changed the text of a sequence"
        self.rows.append(list(rows))
        self.texts.append(before)
        self.drafts.append(draft)
        return draft

    def observe_pass(self, judged: JudgedDraft) -> None:
        self.inner.observe_pass(judged)

    def observe_features(self, sequence_id: int, token_ids: list[int], start: int, features: Tensor) -> None:
        self.inner.observe_features(sequence_id, token_ids, start, features)

    def observe(self, sequence_id: int, token_ids: list[int]) -> None:
        before = list(token_ids)
        self.inner.observe(sequence_id, token_ids)
        assert token_ids == before, "the drafter changed the text of a sequence"

    def forget(self, sequence_id: int) -> None:
        self.inner.forget(sequence_id)

    @property
    def widths(self) -> list[list[int]]:
        """Per step, the draft tokens of each row."""
        return [list(draft.num_draft_tokens) for draft in self.drafts]

    def proposed(self, sequence_id: int) -> list[list[int]]:
        """The drafts of one sequence, step by step."""
        found = []
        for rows, draft in zip(self.rows, self.drafts, strict=True):
            for row, tokens, count in zip(rows, draft.token_ids.tolist(), draft.num_draft_tokens, strict=True):
                if row.sequence_id == sequence_id:
                    found.append(tokens[:count])
        return found


def parts_of(drafter: Drafter) -> list[Drafter]:
    """A drafter and those that it is made of, as far as they read the target's tokens; a recorder stands for what it
    records."""
    if isinstance(drafter, RecordingDrafter):
        return parts_of(drafter.inner)
    if not drafter.reads_target_tokens:
        return [drafter]
    inside = [value for held in vars(drafter).values() for value in (held if isinstance(held, list) else [held])]
    return [drafter, *(part for value in inside if isinstance(value, Drafter) for part in parts_of(value))]
