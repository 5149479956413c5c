"""How ragged rows lie in one pass: order, padding, positions at the limit, segments, buckets of keys."""

from __future__ import annotations

import pytest
import torch

from foredraft.target.layout import PassRow, PassShape, build_layout
from foredraft.target.segments import LONG_ROW
from foredraft.target.slots import KVSlots
from foredraft.target.storage import GROWTH, LayerShape

NARROW = PassShape(min_tokens=1, min_queries=1)


def slots_of(*lengths: int, max_len: int = 4096) -> KVSlots:
    """Sequences 0, 1, ... of these committed lengths, in the slots of the same numbers."""
    slots = KVSlots([LayerShape(1, 2, 2)], torch.float32, torch.device("cpu"), max_len)
    for sequence, length in enumerate(lengths):
        slots.open(sequence)
        slots.reserve(max(1, length))
        slots.commit(sequence, length)
    return slots


def test_ragged_rows_lie_end_to_end_in_the_order_of_slots():
    """Rows given in another order than their slots: tokens by slot, logits in the caller's order."""
    slots = slots_of(10, 20, 0)
    rows = [PassRow(2, [31, 32, 33], 2), PassRow(0, [11], 1), PassRow(1, [21, 22], 2)]
    layout = build_layout(rows, slots, PassShape())
    assert layout.token_ids.tolist() == [[11, 21, 22, 31, 32, 33]]
    assert layout.positions.tolist() == [[10, 20, 21, 0, 1, 2]]
    assert layout.logits_index.tolist() == [4, 5, 0, 1, 2]
    assert layout.num_logits == 5
    assert layout.rows.tolist() == [[0, 1, 0, 10, 11, -1], [1, 2, 1, 20, 22, -1], [3, 3, 2, 0, 3, -1]]
    size = slots.capacity
    assert layout.write_index.tolist() == [10, size + 20, size + 21, 2 * size, 2 * size + 1, 2 * size + 2]


def test_nodes_of_a_tree_have_places_of_their_own_and_share_positions():
    """Two pending tokens and four nodes; the other row is a chain, though it says it with parents."""
    slots = slots_of(10, 20)
    rows = [PassRow(0, [1, 2, 3, 4, 5, 6], 5, [-1, -1, 1, 0]), PassRow(1, [7, 8, 9], 3, [-1, 0])]
    layout = build_layout(rows, slots, PassShape())
    assert layout.positions.tolist() == [[10, 11, 12, 12, 13, 13, 20, 21, 22]]
    assert layout.write_index.tolist() == [10, 11, 12, 13, 14, 15, *range(slots.capacity + 20, slots.capacity + 23)]
    assert layout.logits_index.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert layout.rows.tolist() == [[0, 6, 0, 10, 12, 0], [6, 3, 1, 20, 23, -1]]
    assert layout.paths.tolist() == [[12, 0], [13, 0], [13, 14], [12, 15]]


@pytest.mark.parametrize("window", [None, 2])
def test_nodes_fed_before_are_ancestors_like_others(window):
    """A tree fed in two passes: the second one's nodes see what they would see if all were fed at once."""
    slots, parents, tokens = slots_of(3), [-1, -1, 1, 0], [2, 3, 4, 5]
    whole = build_layout([PassRow(0, tokens, 4, parents)], slots, NARROW)
    rest = build_layout([PassRow(0, tokens[2:], 2, parents, num_fed=2)], slots, NARROW)
    assert rest.positions.tolist() == [whole.positions[0, 2:].tolist()]
    assert rest.write_index.tolist() == whole.write_index[2:].tolist()
    assert rest.paths.tolist() == whole.paths.tolist()
    assert rest.rows.tolist() == [[0, 2, 0, 5, 3, 0]]
    masks = [layout.segments[0].mask(window, 1, torch.float32)[0, 0] for layout in (whole, rest)]
    assert torch.equal(masks[0][2:], masks[1])


@pytest.mark.parametrize("window", [None, 2])
def test_a_node_sees_the_text_and_its_ancestors(window):
    """The mask for torch's kernels, beside a row that is a chain and shorter."""
    rows = [PassRow(0, [1, 2, 3, 4, 5], 4, [-1, -1, 1, 0]), PassRow(1, [7, 8], 1)]
    (segment,) = build_layout(rows, slots_of(3, 1), PassShape()).segments
    mask = segment.mask(window, 1, torch.float32)
    seen = [[i for i, value in enumerate(row) if value == 0] for row in mask[0, 0].tolist()]
    full = [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 2, 3, 5, 6], [0, 1, 2, 3, 4, 7]]
    near = [[2, 3], [3, 4], [3, 5], [5, 6], [4, 7]]
    assert seen == (full if window is None else near)
    chain = [[i for i, value in enumerate(row) if value == 0] for row in mask[1, 0].tolist()]
    assert chain[:2] == ([[0, 1], [0, 1, 2]] if window is None else [[0, 1], [1, 2]])


def test_a_tree_in_a_short_pass_is_filled_up_behind_its_last_node():
    layout = build_layout([PassRow(0, [1, 2, 3], 3, [-1, -1])], slots_of(3), PassShape(min_tokens=5))
    assert layout.positions.tolist() == [[3, 4, 4, 5, 6]]
    assert layout.logits_index.tolist()[:3] == [0, 1, 2]


@pytest.mark.parametrize("min_tokens", [1, 2, 4, 8])
def test_a_short_pass_is_filled_up_with_its_last_token(min_tokens):
    """Padding follows the last row's own tokens, in scratch space, and no logit of it is delivered."""
    layout = build_layout([PassRow(0, [5], 1)], slots_of(7), PassShape(min_tokens=min_tokens, min_queries=1))
    assert layout.token_ids.tolist() == [[5] * min_tokens]
    assert layout.positions.tolist() == [list(range(7, 7 + min_tokens))]
    assert layout.write_index.tolist() == list(range(7, 7 + min_tokens))
    assert layout.logits_index.tolist() == [0] * min_tokens
    assert layout.num_logits == 1


def test_padding_goes_to_the_last_slot_and_not_to_the_last_row_given():
    """Logits of the padded row are those of its real tokens."""
    layout = build_layout([PassRow(1, [21], 1), PassRow(0, [11], 1)], slots_of(3, 4), PassShape(min_tokens=4))
    assert layout.token_ids.tolist() == [[11, 21, 21, 21]]
    assert layout.positions.tolist() == [[3, 4, 5, 6]]
    assert layout.logits_index.tolist()[:2] == [1, 0]
    assert layout.num_logits == 2


def test_the_caller_tokens_are_not_changed_by_padding():
    """Padding is added to a copy."""
    row = PassRow(0, [5], 1)
    build_layout([row], slots_of(0), PassShape(min_tokens=8))
    assert row.token_ids == [5]


def test_a_pass_without_logits_is_not_padded_with_any():
    """Chunks of prompts want none."""
    layout = build_layout([PassRow(0, [5, 6, 7], 0)], slots_of(0), PassShape())
    assert layout.logits_index.tolist() == []
    assert layout.num_logits == 0


def test_positions_stop_at_the_limit_where_padding_would_pass_it():
    """The last token of a full sequence: padding has no position of its own, but a place to be written."""
    slots = slots_of(GROWTH - 1, max_len=GROWTH)
    layout = build_layout([PassRow(0, [5], 1)], slots, PassShape(min_tokens=4, min_queries=4))
    assert layout.positions.tolist() == [[GROWTH - 1] * 4]
    assert layout.write_index.tolist() == [GROWTH - 1, GROWTH, GROWTH + 1, GROWTH + 2]
    assert slots.capacity >= GROWTH + 3


def test_scratch_of_the_last_position_stays_in_its_own_slot():
    """With several slots a write past the capacity would land in the neighbour's first tokens."""
    slots = slots_of(GROWTH - 1, GROWTH - 1, max_len=GROWTH)
    shape = PassShape(min_tokens=8, min_queries=8)
    layout = build_layout([PassRow(0, [5], 1), PassRow(1, [6], 1)], slots, shape)
    slot_of_token = (layout.write_index // slots.capacity).tolist()
    assert slot_of_token == [0] + [1] * 7


def test_short_rows_of_neighbouring_slots_share_a_segment():
    """Padded to the widest; gather and scatter undo each other."""
    layout = build_layout([PassRow(i, [i] * n, 1) for i, n in enumerate((1, 3, 2))], slots_of(5, 6, 7), NARROW)
    (segment,) = layout.segments
    assert (segment.num_rows, segment.num_queries, segment.first_token, segment.last_token) == (3, 3, 0, 6)
    assert segment.gather.tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 5]
    assert segment.scatter.tolist() == [0, 3, 4, 5, 6, 7]
    assert segment.gather[segment.scatter].tolist() == list(range(6))
    assert segment.query_positions.tolist() == [[5, 6, 7], [6, 7, 8], [7, 8, 9]]


def test_rows_of_one_width_need_no_gather():
    """The common case, decoding with drafts of one length."""
    layout = build_layout([PassRow(i, [1, 2], 1) for i in range(3)], slots_of(5, 6, 7), PassShape())
    assert layout.segments[0].gather is None
    assert layout.segments[0].scatter is None


@pytest.mark.parametrize(
    ("widths", "slots_used", "expected"),
    [
        ((1, LONG_ROW + 1, 2), (0, 1, 2), [(0, 1), (1, 1), (2, 1)]),
        ((LONG_ROW, 1), (0, 1), [(0, 2)]),
        ((LONG_ROW + 1, LONG_ROW + 1), (0, 1), [(0, 1), (1, 1)]),
        ((1, 1, 1), (0, 1, 3), [(0, 2), (3, 1)]),
        ((2, 1), (1, 3), [(1, 1), (3, 1)]),
    ],
)
def test_segments_end_at_long_rows_and_at_gaps(widths, slots_used, expected):
    """Prompts alone, and no slot of a sequence that is not in the pass."""
    rows = [PassRow(s, [1] * w, 1) for s, w in zip(slots_used, widths, strict=True)]
    layout = build_layout(rows, slots_of(3, 3, 3, 3), NARROW)
    assert [(s.first_slot, s.num_rows) for s in layout.segments] == expected
    assert [s.last_token - s.first_token for s in layout.segments] == [
        sum(w for s, w in zip(slots_used, widths, strict=True) if first <= s < first + n) for first, n in expected
    ]


@pytest.mark.parametrize(
    ("needed", "keys"), [(1, 128), (128, 128), (129, 256), (256, 256), (257, 512), (512, 512), (513, 1024)]
)
def test_keys_are_read_in_buckets(needed, keys):
    """The buckets are what makes a row's bits independent of its neighbours' lengths."""
    assert PassShape().num_keys(needed) == keys
    assert PassShape(short_keys=()).num_keys(needed) == -(-needed // 512) * 512


def test_a_segment_reads_as_many_keys_as_its_longest_row_needs():
    """The storage is grown for the bucket, not only for the tokens."""
    slots = slots_of(5, 511)
    layout = build_layout([PassRow(0, [1], 1), PassRow(1, [1, 2], 1)], slots, PassShape())
    assert layout.segments[0].num_keys == 1024
    assert slots.capacity >= 1024


@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_mask_shows_each_query_its_own_past(window):
    """Causal, within the window, repeated for the query heads of a group."""
    layout = build_layout([PassRow(0, [1, 2], 1), PassRow(1, [1], 1)], slots_of(4, 2), NARROW)
    mask = layout.segments[0].mask(window, 2, torch.float32)
    assert mask.shape == (2, 1, 4, 128)
    for row, start in enumerate((4, 2)):
        for query in range(2):
            seen = (mask[row, 0, 2 * query + 1] == 0).nonzero().flatten().tolist()
            position = start + query
            assert seen == list(range(0 if window is None else max(0, position - window + 1), position + 1))
    assert layout.segments[0].mask(window, 2, torch.float32) is mask
