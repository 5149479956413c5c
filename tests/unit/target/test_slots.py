"""The KV slots against a plain list per sequence: what is committed is never lost, moved or mixed up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from foredraft.errors import RequestError
from foredraft.target.retained import SHORTEST, common_prefix
from foredraft.target.slots import RETAINED_SHARE, KVSlots
from foredraft.target.storage import GROWTH, LayerShape

MAX_LEN = 1200
SHAPES = (LayerShape(1, 2, 3), LayerShape(2, 2, 1))
CPU = torch.device("cpu")


def write(slots: KVSlots, sequence: int, tags: list[int]) -> None:
    """One pass: tags as keys and their negatives as values, at and past the committed length."""
    start = slots.slot(sequence) * slots.capacity + slots.length(sequence)
    index = torch.arange(start, start + len(tags))
    for layer, shape in enumerate(slots.layers):
        column = torch.tensor(tags, dtype=torch.float32)[:, None] + layer
        keys = column.expand(-1, shape.num_kv_heads * shape.key_dim)
        values = -column.expand(-1, shape.num_kv_heads * shape.value_dim)
        slots.write(layer, index, keys, values)
    if slots.states is not None:
        slots.write_states(index, torch.tensor(tags, dtype=torch.float32)[:, None, None].expand(-1, 2, 3))
        slots.write_states(index, torch.zeros(len(tags), 1, 3))  # of another kind: not stored


def tags_of(slots: KVSlots, sequence: int) -> list[int]:
    """What every layer, head and lane of the cache says that the sequence holds."""
    found = []
    for layer, (keys, values) in enumerate(slots.read(sequence)):
        column = keys.flatten(1)[:, :1]
        assert (keys.flatten(1) == column).all()
        assert (values.flatten(1) == -column).all()
        found.append((column[:, 0] - layer).int().tolist())
    states = slots.read_states(sequence)
    if states is not None:
        assert (states == states[:, :1, :1]).all()
        found.append(states[:, 0, 0].int().tolist())
    assert all(tags == found[0] for tags in found)
    return found[0]


def test_rollback_empties_keeps_and_refuses():
    """Three entries: by 0, 1 and 3; to 0 empties every layer; out of range is refused, nothing wraps."""
    for length, left in ((3, [7, 8, 9]), (2, [7, 8]), (0, [])):
        slots = KVSlots(SHAPES, torch.float32, CPU, MAX_LEN)
        slots.open(4)
        write(slots, 4, [7, 8, 9])
        slots.commit(4, 3)
        for wrong in (4, -1, -2, -5):
            with pytest.raises(ValueError, match=f"to {wrong} tokens: it holds 3; use a length in .0, 3."):
                slots.truncate(4, wrong)
        slots.truncate(4, length)
        assert tags_of(slots, 4) == left
        assert slots.length(4) == length
    slots.truncate(4, 0)
    assert slots.length(4) == 0


@pytest.mark.parametrize(
    ("path", "kept"), [([], [1]), ([0, 1], [1, 5, 6]), ([1], [1, 6]), ([0, 3, 4], [1, 5, 8, 9]), ([2, 4], [1, 7, 9])]
)
def test_the_accepted_path_of_a_tree_is_moved_up(path, kept):
    """One pending token and five nodes, in the second of two slots; later entries overwrite the rest."""
    slots = KVSlots(SHAPES, torch.float32, CPU, MAX_LEN)
    slots.keep_states(2, 3)
    slots.open(1)
    slots.open(2)
    write(slots, 1, [70, 71])
    slots.commit(1, 2)
    write(slots, 2, [1, 5, 6, 7, 8, 9])
    slots.commit(2, 1, path)
    assert tags_of(slots, 2) == kept
    write(slots, 2, [30])
    slots.commit(2, 1)
    assert tags_of(slots, 2) == [*kept, 30]
    assert tags_of(slots, 1) == [70, 71]


def test_commit_is_refused_beyond_the_limit():
    """The message has the limit; the length is unchanged."""
    slots = KVSlots(SHAPES, torch.float32, CPU, 10)
    slots.open(0)
    slots.commit(0, 9)
    for wrong in (2, -1):
        with pytest.raises(ValueError, match="10"):
            slots.commit(0, wrong)
    assert slots.length(0) == 9
    slots.commit(0, 1)


def test_opening_twice_is_refused():
    """A second slot for the same id would orphan the first."""
    slots = KVSlots(SHAPES, torch.float32, CPU, 10)
    slots.open(0)
    with pytest.raises(RequestError, match="0 already has a slot"):
        slots.open(0)
    assert slots.num_open == 1


def test_closing_moves_the_last_into_the_hole():
    """Open sequences fill the first slots, so that a batch is a view."""
    slots = KVSlots(SHAPES, torch.float32, CPU, MAX_LEN)
    for sequence in range(5):
        slots.open(sequence)
        write(slots, sequence, [sequence * 10 + i for i in range(sequence)])
        slots.commit(sequence, sequence)
    slots.close(1)
    assert [slots.slot(s) for s in (0, 4, 2, 3)] == [0, 1, 2, 3]
    assert tags_of(slots, 4) == [40, 41, 42, 43]
    assert 1 not in slots


def test_views_are_not_those_of_the_old_storage():
    """A view that was kept from before the storage grew would show stale keys."""
    slots = KVSlots(SHAPES, torch.float32, CPU, MAX_LEN)
    slots.open(0)
    slots.view(0, 0, 1, 128)
    slots.reserve(GROWTH + 1)
    write(slots, 0, [5])
    keys, values = slots.view(0, 0, 1, 128)
    assert keys.shape == (1, 1, 128, 2)
    assert keys[0, 0, 0].tolist() == [5.0, 5.0]
    assert values[0, 0, 0].tolist() == [-5.0] * 3
    assert slots.view(0, 0, 1, 128)[0] is keys


def test_sizes_are_counted():
    """Bytes of a token are those of all heads of all layers; the storage grows by blocks."""
    slots = KVSlots(SHAPES, torch.bfloat16, CPU, MAX_LEN)
    assert slots.bytes_per_token == 2 * (1 * 5 + 2 * 3)
    assert slots.allocated_bytes == GROWTH * slots.bytes_per_token
    slots.reserve(GROWTH)
    assert slots.capacity == GROWTH
    slots.reserve(GROWTH + 1)
    assert slots.capacity % GROWTH == 0
    assert slots.capacity > GROWTH
    slots.reserve(1)
    assert slots.capacity > GROWTH


LIMIT = 12 * GROWTH


def filled(slots: KVSlots, sequence: int, tags: list[int]) -> None:
    """A sequence whose tokens are also its entries."""
    slots.open(sequence)
    write(slots, sequence, tags)
    slots.commit(sequence, len(tags))


def limited(max_positions: int | None = None, max_retained: int = 4) -> KVSlots:
    slots = KVSlots(SHAPES, torch.float32, CPU, MAX_LEN)
    slots.limit(None if max_positions is None else max_positions * slots.bytes_per_position, max_retained)
    return slots


@pytest.mark.parametrize("beside", [0, 2])
def test_an_ended_text_is_taken_over_or_copied(beside):
    """As a whole it becomes the new one's; of a longer one the prefix is copied and it stays."""
    slots = limited()
    for other in range(beside):
        filled(slots, other, [500 + 100 * other + i for i in range(9)])
    text = list(range(20))
    filled(slots, 10, text)
    filled(slots, 11, [90] * 9)
    slots.retain(10, text)
    assert slots.num_retained == 1
    assert slots.open_with_prefix(12, [*text, 7, 8, 9], {}) == 20
    assert (slots.num_retained, tags_of(slots, 12)) == (0, text)
    slots.retain(12, text)
    assert slots.open_with_prefix(13, [*text[:15], 70, 71], {}) == 15
    assert (slots.num_retained, tags_of(slots, 13)) == (1, text[:15])
    assert slots.open_with_prefix(14, [*text, 7], {}) == 20
    assert tags_of(slots, 14) == text
    assert tags_of(slots, 11) == [90] * 9
    slots.check_integrity()


def test_one_token_is_left_to_feed_and_short_prefixes_are_not_copied():
    """The same text again has all but its last entry; of seven tokens in common nothing is taken."""
    slots = limited()
    text = list(range(20))
    filled(slots, 1, text)
    slots.retain(1, text)
    assert slots.open_with_prefix(2, text, {}) == 19
    assert slots.open_with_prefix(3, [*text[:7], *[50] * 30], {}) == 0
    assert slots.length(3) == 0


def test_a_running_text_lends_its_prefix():
    """Only entries that are there: a token that is not fed yet is none."""
    slots = limited()
    text = list(range(20))
    filled(slots, 1, text[:12])
    assert slots.open_with_prefix(2, text, {1: text}) == 12
    assert tags_of(slots, 1) == tags_of(slots, 2) == text[:12]
    write(slots, 1, [77])
    assert tags_of(slots, 2) == text[:12]


def test_only_what_was_given_out_is_kept():
    """Entries behind the text's end are those of a cut-off draft."""
    slots = limited()
    filled(slots, 1, list(range(20)))
    slots.retain(1, list(range(16)))
    assert slots.open_with_prefix(2, list(range(20)), {}) == 16


def test_the_oldest_text_leaves_first():
    """At the limit of texts and of bytes; a text that was used is not old; a text within another is no second one."""
    slots = limited(max_retained=3)
    texts = [[100 * i + j for j in range(10)] for i in range(4)]
    for i in (0, 1):
        filled(slots, i, texts[i])
        slots.retain(i, texts[i])
    filled(slots, 5, texts[0][:9])
    slots.retain(5, texts[0][:9])
    assert slots.num_retained == 2
    for i in (2, 3):
        filled(slots, i, texts[i])
        slots.retain(i, texts[i])
    assert slots.num_retained == 3
    assert [slots.open_with_prefix(10 + i, [*texts[i], 1], {}) for i in range(4)] == [10, 0, 10, 10]
    slots = limited(max_positions=2 * GROWTH * RETAINED_SHARE)
    for i in (0, 1):
        filled(slots, i, texts[i])
        slots.retain(i, texts[i])
    filled(slots, 2, texts[2])
    assert (slots.num_slots, slots.num_retained) == (2, 1)
    filled(slots, 3, texts[2])
    assert (slots.num_slots, slots.num_retained) == (2, 0)


def test_retained_texts_do_not_make_a_long_one_dearer():
    """With one open sequence the capacity doubles twice and the size stays, for two of the four slots go, then one."""
    slots = limited(max_retained=3)
    for i in range(3):
        filled(slots, i, [100 * i + j for j in range(10)])
        slots.retain(i, [100 * i + j for j in range(10)])
    filled(slots, 5, list(range(60, 100)))
    assert (slots.num_slots, slots.num_retained, slots.capacity) == (4, 3, GROWTH)
    slots.reserve(2 * GROWTH)
    assert (slots.num_slots, slots.num_retained, slots.capacity) == (2, 1, 2 * GROWTH)
    slots.reserve(4 * GROWTH)
    assert (slots.num_slots, slots.num_retained, slots.capacity) == (1, 0, 4 * GROWTH)
    assert tags_of(slots, 5) == list(range(60, 100))


def test_capacity_is_given_back_where_the_limit_asks_for_it():
    """Four positions of GROWTH: one slot of four, then two of two, then four of one."""
    slots = limited(max_positions=4 * GROWTH)
    assert slots.fits(1, 4 * GROWTH)
    assert not slots.fits(2, 2 * GROWTH + 1)
    for count, blocks in ((1, 4), (2, 2), (4, 1), (1, 3)):
        slots.make_room(count, blocks * GROWTH)
        assert slots.num_slots >= count
        assert blocks * GROWTH <= slots.capacity
        slots.check_integrity()


class SlotsMachine(RuleBasedStateMachine):
    """Open, close, retain, reuse, pass, commit, truncate and reserve in any order, beside plain lists.

    The tag of an entry is its token, so a prefix that is reused can be told from one that is not the text's.
    """

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.slots = limited(LIMIT)
        self.slots.keep_states(2, 3)
        self.texts: dict[int, list[int]] = {}
        self.ended: list[list[int]] = []
        self.next_id = self.next_tag = 0

    def has_room(self, num_sequences: int, num_tokens: int) -> bool:
        """As the scheduler asks before it opens or feeds."""
        return self.slots.fits(num_sequences, max([num_tokens, *map(len, self.texts.values())]))

    @rule(target=sequences)
    @precondition(lambda self: len(self.texts) < 7)
    def open(self) -> int:
        self.next_id += 1
        if self.has_room(len(self.texts) + 1, 1):
            self.slots.make_room(len(self.texts) + 1, 1)
            self.slots.open(self.next_id)
            self.texts[self.next_id] = []
        return self.next_id

    @rule(target=sequences, at=st.integers(0, 20), cut=st.integers(0, 600), new=st.integers(0, 30))
    def reuse(self, at: int, cut: int, new: int) -> int:
        """Begin with a part of a text that is running or has been."""
        self.next_id += 1
        known = [*self.texts.values(), *self.ended] or [[]]
        text = [*known[at % len(known)][:cut], *range(self.next_tag, self.next_tag + new + 1)]
        self.next_tag += new + 1
        if self.has_room(len(self.texts) + 1, len(text)):
            self.slots.make_room(len(self.texts) + 1, len(text))
            held = self.slots.open_with_prefix(self.next_id, text, dict(self.texts))
            assert held < len(text)
            assert held >= max([0, *(n for t in self.texts.values() if (n := common_prefix(t, text[:-1])) >= SHORTEST)])
            self.texts[self.next_id] = text[:held]
        return self.next_id

    @rule(sequence=consumes(sequences))
    def close(self, sequence: int) -> None:
        if sequence in self.texts:
            self.slots.close(sequence)
            del self.texts[sequence]

    @rule(sequence=consumes(sequences), cut_off=st.integers(0, 3))
    def retain(self, sequence: int, cut_off: int) -> None:
        if sequence in self.texts:
            text = self.texts.pop(sequence)
            self.slots.retain(sequence, text[: max(0, len(text) - cut_off)])
            self.ended.append(text)

    @rule(sequence=sequences, num_written=st.sampled_from([1, 2, 5, 40, 500]), rejected=st.integers(0, 500))
    def run_pass(self, sequence: int, num_written: int, rejected: int) -> None:
        """Write some, keep those that are not rejected."""
        text = self.texts.get(sequence, [])
        num_written = min(num_written, MAX_LEN - len(text))
        if sequence not in self.texts or not self.has_room(len(self.texts), len(text) + num_written):
            return
        tags = list(range(self.next_tag, self.next_tag + num_written))
        self.next_tag += num_written
        self.slots.reserve(len(text) + num_written)
        write(self.slots, sequence, tags)
        kept = max(0, num_written - rejected)
        self.slots.commit(sequence, kept)
        text += tags[:kept]

    @rule(sequence=sequences, length=st.integers(-2, MAX_LEN))
    def truncate(self, sequence: int, length: int) -> None:
        if sequence not in self.texts:
            return
        if 0 <= length <= len(self.texts[sequence]):
            self.slots.truncate(sequence, length)
            del self.texts[sequence][length:]
        else:
            with pytest.raises(ValueError, match="cannot cut"):
                self.slots.truncate(sequence, length)

    @rule(sequence=sequences, by=st.integers(0, 6))
    def roll_back(self, sequence: int, by: int) -> None:
        if sequence not in self.texts:
            return
        length = max(0, len(self.texts[sequence]) - by)
        self.slots.truncate(sequence, length)
        del self.texts[sequence][length:]

    @rule(num_tokens=st.integers(1, 3 * GROWTH))
    def reserve(self, num_tokens: int) -> None:
        if not self.has_room(max(1, len(self.texts)), num_tokens):
            return
        self.slots.reserve(num_tokens)
        assert self.slots.capacity >= num_tokens

    @invariant()
    def holds_what_was_committed(self) -> None:
        self.slots.check_integrity()
        assert self.slots.allocated_bytes <= LIMIT * self.slots.bytes_per_position
        assert self.slots.num_open == len(self.texts)
        assert sorted(map(self.slots.slot, self.texts)) == list(range(len(self.texts)))
        for sequence, text in self.texts.items():
            assert tags_of(self.slots, sequence) == text


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)
