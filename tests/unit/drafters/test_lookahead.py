"""Lookahead: window and pool, step by step on a target that counts to 9 over and over."""

from __future__ import annotations

import torch

from foredraft.drafters import Draft, DraftRow, JudgedDraft
from foredraft.drafters.lookahead import LookaheadDrafter


def row(text: list[int], num_draft_tokens: int = 24) -> DraftRow:
    return DraftRow(0, text, num_draft_tokens, 0, "greedy", lambda _: None)  # type: ignore[arg-type, return-value]


def count(token: int) -> int:
    return (token + 1) % 10


def judge(text: list[int], draft: Draft, successor=count) -> JudgedDraft:
    """What a target says whose next token is a function of the last; the path follows it."""
    size = draft.num_draft_tokens[0]
    tokens, parents = [text[-1], *draft.token_ids[0, :size].tolist()], draft.parents[0, :size].tolist()
    path, node = [], -1
    while True:
        wanted = successor(tokens[node + 1])
        found = [i for i in range(size) if parents[i] == node and tokens[i + 1] == wanted]
        if not found:
            return JudgedDraft(0, tokens, parents, path, torch.tensor([[successor(t)] for t in tokens]))
        node = found[0]
        path.append(node)


def decode(drafter: LookaheadDrafter, text: list[int], num_tokens: int, **options) -> tuple[list[int], int]:
    steps = 0
    text = list(text)
    while len(text) < num_tokens:
        draft = drafter.propose([row(text, **options)])
        judged = judge(text, draft)
        text += [judged.token_ids[node + 1] for node in judged.path]
        text.append(count(text[-1]))
        drafter.observe_pass(judged)
        steps += 1
    return text, steps


def test_guesses_come_true():
    """Every number becomes a key of the pool, and then three are accepted at a time."""
    text, steps = decode(LookaheadDrafter(5, 4, 3), [3, 4, 5], 63)
    assert text == [(3 + i) % 10 for i in range(len(text))]
    assert steps < 30


def test_a_trie_shares_equal_paths_and_keeps_the_budget():
    draft = LookaheadDrafter(4, 3, 2).propose([row([7, 7, 7, 7])])
    assert draft.token_ids[0].tolist() == [7] * draft.num_draft_tokens[0]
    assert draft.parents[0].tolist() == list(range(-1, draft.num_draft_tokens[0] - 1))
    for budget in range(6):
        assert LookaheadDrafter(4, 3, 2).propose([row([1, 2, 3], budget)]).num_draft_tokens[0] <= budget


def test_a_draft_of_another_source_moves_the_window_and_teaches_nothing():
    drafter = LookaheadDrafter(3, 3, 2)
    drafter.propose([row([1, 2, 3])])
    other = JudgedDraft(0, [3, 4, 5], [-1, 0], [0, 1], torch.tensor([[4], [5], [6]]))
    drafter.observe_pass(other)
    assert vars(drafter)["_windows"][0].pool == {}


def test_the_pool_keeps_the_latest_n_grams_of_a_key():
    drafter = LookaheadDrafter(1, 2, 2)
    for following in (5, 6, 7):
        drafter.propose([row([1])])
        window = vars(drafter)["_windows"][0]
        window.levels = [[9]]
        drafter.propose([row([1])])
        draft = drafter.propose([row([1])])
        drafter.observe_pass(judge([1], draft, lambda token, following=following: following))
    assert list(window.pool[9]) == [(6,), (7,)]
    drafter.forget(0)
    assert vars(drafter)["_windows"] == {}
