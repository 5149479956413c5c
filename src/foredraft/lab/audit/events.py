"""The questions that the sampling audit asks of every token, each with its answer's expectation and variance."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.lab.audit.law import TokenLaw
from foredraft.lab.audit.proposals import Proposal
from foredraft.lab.audit.statistics import Bet, MartingaleTest, NeverTest, PitTests, randomised_pit

LOWEST_LOGPROB = -8.0
"""Log-probabilities are cut off here, so that their differences are bounded."""
_TINY = 1e-12

Ids = NDArray[np.integer[Any]]


class TokenTests:
    """The tests of one audit. Every function asked about is fixed before its token is drawn.

    Attributes:
        excluded: a filter excludes the token.
        proposed: the token is what a deterministic draft proposed.
        favoured: the token is one that a stochastic draft gives more probability than the target does, the very
            set that a wrong rule favours. (That a *drawn* proposal is emitted is not fixed beforehand.)
        draft_best: the token is the likeliest of a stochastic draft.
        shared_number, shared_noise: the token is one that a recovery favours which reads the randomness of the
            draft, both by inversion of the cumulative law or both by Gumbel noise.
        best: the token is the target's likeliest.
        logprob: its log-probability, of at least -8.
        pit: uniformity and serial dependence; tokens are ordered by their ids.
        numbers: the transformed tokens so far.
    """

    def __init__(self) -> None:
        self.excluded = NeverTest("token excluded by the filters")
        self.proposed = MartingaleTest("token proposed by a deterministic draft")
        self.favoured = MartingaleTest("token favoured by the draft")
        self.draft_best = MartingaleTest("most likely token of the draft")
        self.shared_number = MartingaleTest("token favoured by a shared random number")
        self.shared_noise = MartingaleTest("token favoured by shared Gumbel noise")
        self.best = MartingaleTest("most likely token")
        self.logprob = MartingaleTest("log-probability", bound=-LOWEST_LOGPROB)
        self.pit = PitTests()
        self.numbers: list[float] = []

    @property
    def all(self) -> list[Bet]:
        return [
            self.excluded,
            self.proposed,
            self.favoured,
            self.draft_best,
            self.shared_number,
            self.shared_noise,
            self.best,
            self.logprob,
            *self.pit.tests,
        ]

    def add_text(
        self,
        tokens: list[int],
        laws: list[TokenLaw],
        proposals: list[Proposal | None],
        uniforms: NDArray[np.float64],
        noise: float,
        total_variation: float,
    ) -> None:
        """Judge the output tokens of one text.

        Args:
            laws, proposals: one each.
            uniforms: the auditor's own random numbers, one each.
            noise: of logits, for what filters exclude.
            total_variation: of the laws, see :meth:`MartingaleTest.add`.
        """
        self.excluded.add([law.excludes(token, noise) for token, law in zip(tokens, laws, strict=True)])
        below, at = [], []
        for token, law, proposal in zip(tokens, laws, proposals, strict=True):
            self._add_event(self.best, token, law, np.array([law.probs.argmax()]), total_variation)
            self._add_logprob(token, law, total_variation)
            if proposal is not None:
                self._add_proposal(token, law, proposal, total_variation)
            below.append(float(law.probs[:token].sum()))
            at.append(float(law.probs[token]))
        numbers = randomised_pit(below, at, uniforms)
        self.numbers += numbers.tolist()
        self.pit.add(numbers, total_variation)

    def _add_proposal(self, token: int, law: TokenLaw, proposal: Proposal, total_variation: float) -> None:
        if proposal.likely_ids is None or proposal.likely_probs is None:
            self._add_event(self.proposed, token, law, np.unique(proposal.token_ids), total_variation)
            return
        draft_probs = np.zeros_like(law.probs)
        draft_probs[proposal.likely_ids] = proposal.likely_probs
        favoured = np.flatnonzero(draft_probs > law.probs)
        self._add_event(self.favoured, token, law, favoured, total_variation)
        self._add_event(self.draft_best, token, law, proposal.likely_ids[:1], total_variation)
        shared = favoured_by_shared_number(law.probs, draft_probs)
        self._add_event(self.shared_number, token, law, shared, total_variation)
        shared = favoured_by_shared_noise(law.probs, draft_probs)
        self._add_event(self.shared_noise, token, law, shared, total_variation)

    @staticmethod
    def _add_event(test: MartingaleTest, token: int, law: TokenLaw, token_set: Ids, slack: float) -> None:
        probability = min(1.0, float(law.probs[token_set].sum()))
        test.add(token in token_set, probability, probability * (1.0 - probability), slack)

    def _add_logprob(self, token: int, law: TokenLaw, slack: float) -> None:
        probs = law.probs[law.probs > 0.0]
        values = np.maximum(np.log(probs), LOWEST_LOGPROB)
        mean = float(probs @ values)
        variance = max(0.0, float(probs @ values**2) - mean**2)
        drawn = law.probs[token]
        value = max(float(np.log(drawn)), LOWEST_LOGPROB) if drawn > 0.0 else LOWEST_LOGPROB
        self.logprob.add(value, mean, variance, slack)


def favoured_by_shared_number(target_probs: NDArray[np.float64], draft_probs: NDArray[np.float64]) -> Ids:
    """Tokens that come too often if the recovered token is drawn with the random number of the rejected one.

    Given a rejection that number is not uniform: it lies where the draft exceeds the target. The residual law,
    inverted there, gives more to tokens whose stretch of the unit interval meets those places.
    """
    excess = np.maximum(draft_probs - target_probs, 0.0)
    residual = np.maximum(target_probs - draft_probs, 0.0)
    possible = np.flatnonzero(residual > _TINY)
    if excess.sum() <= _TINY or not len(possible):
        return possible[:0]
    ends = np.cumsum(residual[possible]) / residual[possible].sum()
    draft_ends = np.append(0.0, np.cumsum(draft_probs)) / draft_probs.sum()
    rejected_below = np.interp(ends, draft_ends, np.append(0.0, np.cumsum(excess)) / excess.sum())
    comes = np.diff(rejected_below, prepend=0.0)
    favoured: Ids = possible[comes > np.diff(ends, prepend=0.0)]
    return favoured


def favoured_by_shared_noise(target_probs: NDArray[np.float64], draft_probs: NDArray[np.float64]) -> Ids:
    """Tokens that come too often if draft and recovered token are both argmax(log probability + the same noise).

    As a race of exponential clocks: the draft's winner came at a time t, so token v, which lost, has used up the
    share t q_v of its clock when the residual r starts it again; v starts late by t q_v / r_v. With H(s), the sum
    of r_v (s - q_v / r_v) over the v that have started, token v then wins with probability r_v times the integral
    of (1 + H)^-2 from q_v / r_v on (t being exponential), instead of r_v.
    """
    residual = np.maximum(target_probs - draft_probs, 0.0)
    possible = np.flatnonzero(residual > _TINY)
    if not len(possible):
        return possible
    share = residual[possible] / residual[possible].sum()
    starts = draft_probs[possible] / share
    order = np.argsort(starts)
    slope = np.cumsum(share[order])
    worth = 1.0 + np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(starts[order]))])
    pieces = (1.0 / worth - np.append(1.0 / worth[1:], 0.0)) / slope
    from_start_on = np.cumsum(pieces[::-1])[::-1]
    favoured: Ids = possible[order[from_start_on > 1.0]]
    return favoured
