"""The questions that the sampling audit asks of every token, each with its answer's expectation and variance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foredraft.lab.audit.law import TokenLaw
from foredraft.lab.audit.proposals import Proposal
from foredraft.lab.audit.statistics import MartingaleTest, NeverTest, PitTests, Test, randomised_pit

LOWEST_LOGPROB = -8.0
"""Log-probabilities are cut off here, so that their differences are bounded."""


class TokenTests:
    """The tests of one audit. Every function asked about is fixed before its token is drawn.

    Attributes:
        excluded: a filter excludes the token.
        proposed: the token is what a deterministic draft proposed.
        favoured: the token is one that a stochastic draft gives more probability than the target does, the very
            set that a wrong rule favours. (That a *drawn* proposal is emitted is not fixed beforehand.)
        draft_best: the token is the likeliest of a stochastic draft.
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
        self.best = MartingaleTest("most likely token")
        self.logprob = MartingaleTest("log-probability", bound=-LOWEST_LOGPROB)
        self.pit = PitTests()
        self.numbers: list[float] = []

    @property
    def all(self) -> list[Test]:
        return [
            self.excluded,
            self.proposed,
            self.favoured,
            self.draft_best,
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
            self._add_event(self.best, token, law, [int(law.probs.argmax())], total_variation)
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
            self._add_event(self.proposed, token, law, sorted(set(proposal.token_ids)), total_variation)
            return
        favoured = proposal.likely_ids[proposal.likely_probs > law.probs[proposal.likely_ids]]
        self._add_event(self.favoured, token, law, favoured.tolist(), total_variation)
        self._add_event(self.draft_best, token, law, [int(proposal.likely_ids[0])], total_variation)

    @staticmethod
    def _add_event(test: MartingaleTest, token: int, law: TokenLaw, token_set: list[int], slack: float) -> None:
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
