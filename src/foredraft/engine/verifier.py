"""Apply each row's acceptance rule to the target's logits.

The rows of a batch may follow different rules; chains of the same ratio rule are judged together, trees one by one.
All randomness is keyed by the sequence and the position of the token that it decides.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.config import SpeculativeConfig
from foredraft.engine.sequence import Sequence
from foredraft.sampling import (
    SamplingRow,
    Stream,
    adjust_logits,
    gumbel,
    may_change_argmax,
    most_likely_tokens,
    probs_from_logits,
    round_position,
    sample_gumbel,
    sample_inverse_cdf,
    uniform,
)
from foredraft.target.layout import is_chain
from foredraft.types import Draft, Verdict
from foredraft.verify import block, rejection, tree, typical


def rule_for(config: SpeculativeConfig, is_greedy: bool, has_seed: bool) -> str:
    """The acceptance rule of a request: greedy, or the configured one, ``auto`` being resolved by the seed."""
    if is_greedy and not config.is_lossy:
        return "greedy"
    if config.acceptance_rule == "auto":
        return "coupled" if has_seed else "rejection"
    return config.acceptance_rule


@dataclass(frozen=True, slots=True)
class _Row:
    """One sequence's draft and the target's answer to it.

    ``adjusted_MV`` and ``sampling`` have a row for the root and one for each draft token.
    """

    sequence: Sequence
    token_ids: list[int]
    parents: list[int]
    draft_probs: Tensor | None
    adjusted_MV: Tensor
    sampling: list[SamplingRow]

    @property
    def start(self) -> int:
        return len(self.sequence.token_ids)

    @property
    def is_chain(self) -> bool:
        return is_chain(self.parents)

    def probs(self, node: int) -> Tensor:
        """The target's law ``[V]`` behind a node, -1 being the root."""
        return probs_from_logits(self.adjusted_MV[node + 1 : node + 2], [self.sampling[node + 1].params])[0]

    def uniform(self, stream: Stream, key: int) -> float:
        return uniform(self.sequence.noise_seed, stream, key)

    def accept_numbers(self, count: int) -> list[float]:
        return [self.uniform(Stream.ACCEPT, round_position(self.start, i)) for i in range(count)]

    def verdict(self, path: list[int], token: int) -> Verdict:
        return _verdict(self.token_ids, self.parents, path, token)

    def draw_verdict(self, path: list[int], probs_V: Tensor) -> Verdict:
        """End the path with a token drawn from ``probs_V``."""
        number = self.uniform(Stream.RECOVER, self.start + len(path))
        return self.verdict(path, int(sample_inverse_cdf(probs_V[None], torch.tensor([number], dtype=torch.float64))))


class Verifier:
    """Decides what each row of a step emits."""

    def __init__(self, config: SpeculativeConfig):
        self._config = config

    def verify(self, sequences: Seq[Sequence], draft: Draft, logits_MV: Tensor) -> list[Verdict]:
        """Judge the draft.

        Args:
            sequences: the rows, each with one logits row for its last token and one for each draft token.
            logits_MV: ``[sum of (num_draft_tokens + 1), V]``, in the order of the rows.
        """
        if all(s.rule == "greedy" and not may_change_argmax(s.sampling_row(())) for s in sequences):
            return _follow_argmax(draft, logits_MV)
        rows = _rows(sequences, draft, logits_MV)
        verdicts: dict[int, Verdict] = {}
        chains: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            rule = row.sequence.rule
            if rule in ("greedy", "coupled", "match"):
                verdicts[i] = _follow_target(row)
            elif not row.token_ids and rule != "typical":
                verdicts[i] = row.draw_verdict([], row.probs(-1))
            elif row.is_chain:
                chains.setdefault(rule, []).append(i)
            else:
                verdicts[i] = self._tree(row)
        for rule, members in chains.items():
            verdicts.update(zip(members, self._chains(rule, [rows[i] for i in members]), strict=True))
        return [verdicts[i] for i in range(len(rows))]

    def _tree(self, row: _Row) -> Verdict:
        if row.sequence.rule == "typical":
            before = [parent + 1 for parent in row.parents]
            target_probs = probs_from_logits(row.adjusted_MV, [s.params for s in row.sampling])
            tokens, counts = torch.tensor([row.token_ids]), torch.tensor([len(before)])
            passed = self._typical(tokens, counts, target_probs[[*before, 0]][None])[0].bool().tolist()
            path = tree.longest_path(row.parents, passed)
            return row.draw_verdict(path, target_probs[path[-1] + 1 if path else 0])
        numbers = row.accept_numbers(len(row.token_ids))
        return row.draw_verdict(*tree.rejection_path(row.token_ids, row.parents, row.probs, row.draft_probs, numbers))

    def _chains(self, rule: str, rows: list[_Row]) -> list[Verdict]:
        """The rules that compare probabilities: rejection, block, typical."""
        width = max(len(row.token_ids) for row in rows)
        picked = [(row, min(i, len(row.token_ids))) for row in rows for i in range(width + 1)]
        adjusted = torch.stack([row.adjusted_MV[i] for row, i in picked])
        probs = probs_from_logits(adjusted, [row.sampling[i].params for row, i in picked])
        target_probs = probs.view(len(rows), width + 1, -1)
        draft_ids = torch.tensor([row.token_ids + [0] * (width - len(row.token_ids)) for row in rows])
        draft_ids = draft_ids.view(len(rows), width).long()
        counts = torch.tensor([len(row.token_ids) for row in rows])
        draft_probs = _padded(rows, width)
        noise = torch.tensor([row.accept_numbers(width) for row in rows], dtype=torch.float64).view(len(rows), width)
        if rule == "block":
            accepted = block.count_accepted(block.stop_probs(draft_ids, counts, target_probs, draft_probs), noise)
            next_probs = block.next_token_probs(draft_ids, counts, target_probs, draft_probs, accepted)
        elif rule == "rejection":
            passes = rejection.accept_probs(draft_ids, counts, target_probs, draft_probs)
            accepted = rejection.count_accepted(passes, noise)
            next_probs = rejection.next_token_probs(draft_ids, counts, target_probs, draft_probs, accepted)
        else:
            accepted = rejection.count_accepted(self._typical(draft_ids, counts, target_probs), noise)
            next_probs = typical.next_token_probs(target_probs, accepted)
        return [
            row.draw_verdict(list(range(count)), probs_V)
            for row, count, probs_V in zip(rows, accepted.tolist(), next_probs, strict=True)
        ]

    def _typical(self, draft_ids: Tensor, counts: Tensor, target_probs: Tensor) -> Tensor:
        threshold, alpha = self._config.posterior_threshold, self._config.posterior_alpha
        return typical.accept_probs(draft_ids, counts, target_probs, threshold, alpha)


def _rows(sequences: Seq[Sequence], draft: Draft, logits_MV: Tensor) -> list[_Row]:
    tokens = [row[:n] for row, n in zip(draft.token_ids.tolist(), draft.num_draft_tokens, strict=True)]
    parents = [row[:n] for row, n in zip(draft.parents.tolist(), draft.num_draft_tokens, strict=True)]
    sampling = []
    for sequence, drafted, tree_parents in zip(sequences, tokens, parents, strict=True):
        prefixes: list[tuple[int, ...]] = [()]
        for token, parent in zip(drafted, tree_parents, strict=True):
            prefixes.append((*prefixes[parent + 1], token))
        sampling.append([sequence.sampling_row(prefix) for prefix in prefixes])
    adjusted_MV = adjust_logits(logits_MV, [s for row in sampling for s in row])
    each = adjusted_MV.split([len(row) for row in sampling])
    probs = [None] * len(tokens) if draft.probs is None else list(draft.probs)
    return [_Row(*fields) for fields in zip(sequences, tokens, parents, probs, each, sampling, strict=True)]


def _verdict(token_ids: list[int], parents: list[int], path: list[int], token: int) -> Verdict:
    node = path[-1] if path else -1
    return Verdict([*(token_ids[i] for i in path), token], path, node not in parents)


def _follow_argmax(draft: Draft, logits_MV: Tensor) -> list[Verdict]:
    """Greedy rows that ask for nothing: no look at probabilities, nor at the logits in another dtype."""
    best, first, verdicts = most_likely_tokens(logits_MV).tolist(), 0, []
    rows = zip(draft.token_ids.tolist(), draft.parents.tolist(), draft.num_draft_tokens, strict=True)
    for token_ids, parents, count in rows:
        verdicts.append(_follow(token_ids[:count], parents[:count], best[first : first + count + 1]))
        first += count + 1
    return verdicts


def _follow(token_ids: list[int], parents: list[int], best: list[int]) -> Verdict:
    """``best`` are the target's tokens behind the text and behind each token of the draft."""
    return _verdict(token_ids, parents, *tree.match_path(token_ids, parents, lambda node, _: best[node + 1]))


def _follow_target(row: _Row) -> Verdict:
    """Name the target's own token node by node while it is drafted.

    ``coupled`` draws it with the noise that the drafter used, ``match`` with a number of its own.
    """
    rule, seed = row.sequence.rule, row.sequence.noise_seed
    if rule == "greedy":
        return _follow(row.token_ids, row.parents, most_likely_tokens(row.adjusted_MV).tolist())

    def target_token(node: int, depth: int) -> int:
        probs, position = row.probs(node)[None], row.start + depth
        if rule == "coupled":
            return int(sample_gumbel(probs, [gumbel(seed, Stream.TARGET, position, probs.shape[-1])]))
        number = torch.tensor([uniform(seed, Stream.TARGET, position)], dtype=torch.float64)
        return int(sample_inverse_cdf(probs, number))

    return row.verdict(*tree.match_path(row.token_ids, row.parents, target_token))


def _padded(rows: list[_Row], width: int) -> Tensor | None:
    if rows[0].draft_probs is None:
        return None
    return torch.stack([row.draft_probs[:width] for row in rows if row.draft_probs is not None])
