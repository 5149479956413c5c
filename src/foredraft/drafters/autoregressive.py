"""Drafting token by token from a model's logits, whatever the model and wherever its cache lies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter, DraftRow, chain_draft
from foredraft.sampling import (
    SamplingRow,
    Stream,
    adjust_logits,
    gumbel,
    has_filters,
    may_change_argmax,
    most_likely_tokens,
    probs_from_logits,
    round_position,
    sample_gumbel,
    sample_inverse_cdf,
    uniform,
)
from foredraft.types import Draft


@dataclass(slots=True)
class Chain:
    """A draft in the making: the committed text in the draft model's tokens, and the tokens drawn after it.

    ``ended`` is set with the first token that the draft model finds unlikely, which stays: whether a token is verified
    may depend on those before it, never on itself (a drafter that drops it changes the output's law).
    """

    row: DraftRow
    text: list[int]
    token_ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    ended: bool = False


def takes_highest(row: DraftRow) -> bool:
    """Whether a row's draft is where scores are highest: the logits of a greedy row, under the coupled rule logits over
    temperature with the target's noise. Filters and options ask for more."""
    sampling = row.sampling_row(())
    by_noise = row.rule == "coupled" and not has_filters(sampling.params)
    return not may_change_argmax(sampling) and (sampling.params.is_greedy or by_noise)


class AutoregressiveDrafter(Drafter):
    """Draws each token of a draft from a model's law after the ones before.

    Args:
        vocab_size: of the target.
        token_ids: the target's token of each column of the logits; None if they are the same.
    """

    stochastic = True

    def __init__(self, vocab_size: int, token_ids: Tensor | None = None):
        self.vocab_size = vocab_size
        self._token_ids = token_ids
        self._target_tokens = None if token_ids is None else token_ids.tolist()

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return self.draft(rows, [row.token_ids for row in rows])

    def draft(self, rows: Sequence[DraftRow], texts: Sequence[list[int]]) -> Draft:
        """Draft for rows whose committed text is ``texts`` in the tokens that the draft model reads."""
        chains = [Chain(row, text) for row, text in zip(rows, texts, strict=True)]
        room = {id(chain): self._room(chain.row, chain.text) for chain in chains}
        active = [chain for chain in chains if room[id(chain)]]
        keep_probs = any(not row.sampling_row(()).params.is_greedy for row in rows)
        highest = not self.stop_below and all(map(takes_highest, rows))
        for chain in active:
            self._catch_up(chain.row.sequence_id, chain.text)
        while active:
            drawn, steps = active, min(room[id(chain)] - len(chain.token_ids) for chain in active)
            if not (highest and self._run_on(active, steps)):
                drawn = self._draw(active, self._next_logits(active), keep_probs)
            active = [chain for chain in drawn if not chain.ended and len(chain.token_ids) < room[id(chain)]]
        width = max((len(chain.token_ids) for chain in chains), default=0)
        probs = self._stack([chain.probs for chain in chains], width) if any(chain.probs for chain in chains) else None
        return chain_draft([chain.token_ids for chain in chains], probs)

    @abstractmethod
    def _room(self, row: DraftRow, text: list[int]) -> int:
        """Tokens that can be drafted behind a text, at most as many as the row wants; asked before any is."""

    @abstractmethod
    def _catch_up(self, sequence_id: int, text: list[int]) -> None:
        """Make the cache ready to draft behind a text."""

    @abstractmethod
    def _next_logits(self, chains: list[Chain]) -> Tensor:
        """Logits of the token behind each, as :meth:`_over_target` takes them; feeds what has not been fed."""

    def _run_on(self, chains: list[Chain], num_steps: int) -> bool:
        """Add tokens to each chain without showing their logits, where those with the highest scores are wanted (see
        :func:`takes_highest`); False where that cannot be done."""
        return False

    def _over_target(self, values: Tensor, other: float = float("-inf")) -> Tensor:
        """Values of the columns over the vocabulary of the target, ``[..., V]``; ``other`` where there is no column."""
        if self._token_ids is None:
            return values
        scattered = values.new_full((*values.shape[:-1], self.vocab_size), other)
        scattered[..., self._token_ids] = values
        return scattered

    def _target_token(self, index: int) -> int:
        """The target's token of a column of the logits."""
        return index if self._target_tokens is None else self._target_tokens[index]

    def _adjusted(self, logits: Tensor, sampling: Sequence[SamplingRow]) -> tuple[Tensor, bool]:
        """Adjusted logits, and whether they still have the columns of the logits: options name tokens of the target."""
        if any(map(may_change_argmax, sampling)):
            return adjust_logits(self._over_target(logits), sampling), False
        return logits.float(), True

    def _noise(self, row: DraftRow, position: int, is_narrow: bool) -> Tensor:
        """The noise with which the target draws the token at a position under the coupled rule, for each column."""
        noise = gumbel(row.noise_seed, Stream.TARGET, position, self.vocab_size)
        return noise[self._token_ids.cpu()] if is_narrow and self._token_ids is not None else noise

    def _draw(self, chains: list[Chain], logits: Tensor, keep_probs: bool) -> list[Chain]:
        """Add a token to each chain, with the distribution it was drawn from if ``keep_probs``.

        A chain that the request's options leave no token that the draft model can say gets none, and ends.

        Returns:
            the chains that got a token.
        """
        sampling = [chain.row.sampling_row(tuple(chain.token_ids)) for chain in chains]
        if not keep_probs and not self.stop_below and not any(map(may_change_argmax, sampling)):
            for chain, index in zip(chains, most_likely_tokens(logits).tolist(), strict=True):
                chain.token_ids.append(self._target_token(index))
            return chains
        adjusted, is_narrow = self._adjusted(logits, sampling)
        possible = torch.isfinite(adjusted.amax(dim=-1))
        if not possible.all():
            chains = [chain for chain, can in zip(chains, possible.tolist(), strict=True) if can]
            adjusted = adjusted[possible]
        if not keep_probs:  # every row is greedy
            all_probs = torch.softmax(adjusted, dim=-1) if self.stop_below else adjusted
            drawn = most_likely_tokens(adjusted).tolist()
        else:
            all_probs = probs_from_logits(adjusted, [chain.row.sampling_row(()).params for chain in chains])
            drawn = [self._sample(chain, probs, is_narrow) for chain, probs in zip(chains, all_probs, strict=True)]
        for chain, probs, index in zip(chains, all_probs, drawn, strict=True):
            chain.token_ids.append(self._target_token(index) if is_narrow else index)
            chain.ended = self.stop_below > 0.0 and float(probs[index]) < self.stop_below
            if keep_probs:
                chain.probs.append(self._over_target(probs, 0.0) if is_narrow else probs)
        return chains

    def _sample(self, chain: Chain, probs: Tensor, is_narrow: bool) -> int:
        """The column that is drawn."""
        row, position = chain.row, len(chain.row.token_ids)
        if row.rule == "coupled":
            noise = self._noise(row, position + len(chain.token_ids), is_narrow)
            return int(sample_gumbel(probs[None], [noise]))
        key = round_position(position, len(chain.token_ids))
        u = torch.tensor([uniform(row.noise_seed, Stream.DRAFT, key)], dtype=torch.float64)
        return int(sample_inverse_cdf(probs[None], u))

    def _stack(self, drawn: list[list[Tensor]], width: int) -> Tensor:
        """``[B, width, V]``; zeros where nothing was drawn."""
        stacked = torch.zeros(len(drawn), width, self.vocab_size)
        for i, row in enumerate(drawn):
            for j, probs in enumerate(row):
                stacked[i, j] = probs
        return stacked
