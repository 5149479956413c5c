"""Token recycling: the table, and drafts from it."""

from __future__ import annotations

import torch

from foredraft.drafters import DraftRow, JudgedDraft
from foredraft.drafters.recycling import NUM_SUCCESSORS, RecyclingDrafter, Table


def row(text: list[int], num_draft_tokens: int) -> DraftRow:
    return DraftRow(0, text, num_draft_tokens, 0, "greedy", lambda _: None)  # type: ignore[arg-type, return-value]


def judged(tokens: list[int], parents: list[int], path: list[int], tops: list[list[int]]) -> JudgedDraft:
    filled = [top + list(range(50, 50 + NUM_SUCCESSORS - len(top))) for top in tops]
    return JudgedDraft(0, tokens, parents, path, torch.tensor(filled))


def test_a_prompt_gives_what_followed_each_token_the_latest_first():
    table = Table.of_prompt([1, 2, 1, 3, 1, 2, 4])
    assert table.successors == {2: [4, 1], 1: [2, 3], 3: [1]}


def test_the_targets_likeliest_tokens_replace_the_prompts():
    """Also those behind nodes that were rejected."""
    drafter = RecyclingDrafter()
    drafter.propose([row([1, 2, 1, 2], 4)])
    drafter.observe_pass(judged([2, 1, 9], [-1, -1], [0], [[1, 5], [7, 6], [8]]))
    draft = drafter.propose([row([1, 2, 1, 2, 1, 7, 9], 3)])
    assert draft.token_ids[0, 0] == 8
    draft = drafter.propose([row([1, 2, 1, 2, 1], 4)])
    assert draft.token_ids[0, :2].tolist() == [7, 6]
    drafter.forget(0)
    assert vars(drafter)["_tables"] == {}


def test_a_draft_is_the_most_probable_tree_of_the_table():
    """First and second choices everywhere: a first child's first child goes before a third choice."""
    drafter = RecyclingDrafter()
    drafter.propose([row([1], 0)])
    drafter.observe_pass(judged([1, 2, 3], [-1, 0], [0, 1], [[2, 3], [3, 4], [1, 5]]))
    draft = drafter.propose([row([1, 2, 3, 1], 4)])
    assert draft.token_ids.tolist() == [[2, 3, 3, 50]] or draft.token_ids[0, :2].tolist() == [2, 3]
    assert draft.parents[0, :2].tolist() == [-1, 0]


def test_ranks_that_hit_gain_and_others_lose():
    table = Table.of_prompt([1, 2])
    before = next(iter(table.expand(1)))[1]
    table.learn(1, [2, 3], None)
    for _ in range(50):
        table.learn(1, [2, 3], 3)
    chances = {token: chance for token, chance, _ in table.expand(1)}
    assert chances[3] > before > chances[2]
