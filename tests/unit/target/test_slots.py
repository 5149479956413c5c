"""The KV slots against a plain list per sequence: what is committed is never lost, moved or mixed up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from foredraft.errors import RequestError
from foredraft.target.slots import GROWTH, KVSlots, LayerShape

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


def tags_of(slots: KVSlots, sequence: int) -> list[int]:
    """What every layer, head and lane of the cache says that the sequence holds."""
    found = []
    for layer, (keys, values) in enumerate(slots.read(sequence)):
        column = keys.flatten(1)[:, :1]
        assert (keys.flatten(1) == column).all()
        assert (values.flatten(1) == -column).all()
        found.append((column[:, 0] - layer).int().tolist())
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


class SlotsMachine(RuleBasedStateMachine):
    """Open, close, pass, commit, truncate and reserve in any order, beside plain lists."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.slots = KVSlots(SHAPES, torch.float32, CPU, MAX_LEN)
        self.texts: dict[int, list[int]] = {}
        self.next_id = self.next_tag = 0

    @rule(target=sequences)
    @precondition(lambda self: len(self.texts) < 7)
    def open(self) -> int:
        self.next_id += 1
        self.slots.open(self.next_id)
        self.texts[self.next_id] = []
        return self.next_id

    @rule(sequence=consumes(sequences))
    def close(self, sequence: int) -> None:
        self.slots.close(sequence)
        del self.texts[sequence]

    @rule(sequence=sequences, num_written=st.sampled_from([1, 2, 5, 40, 500]), rejected=st.integers(0, 500))
    def run_pass(self, sequence: int, num_written: int, rejected: int) -> None:
        """Write some, keep those that are not rejected."""
        text = self.texts[sequence]
        num_written = min(num_written, MAX_LEN - len(text))
        tags = list(range(self.next_tag, self.next_tag + num_written))
        self.next_tag += num_written
        self.slots.reserve(len(text) + num_written)
        write(self.slots, sequence, tags)
        kept = max(0, num_written - rejected)
        self.slots.commit(sequence, kept)
        text += tags[:kept]

    @rule(sequence=sequences, length=st.integers(-2, MAX_LEN))
    def truncate(self, sequence: int, length: int) -> None:
        if 0 <= length <= len(self.texts[sequence]):
            self.slots.truncate(sequence, length)
            del self.texts[sequence][length:]
        else:
            with pytest.raises(ValueError, match="cannot cut"):
                self.slots.truncate(sequence, length)

    @rule(sequence=sequences, by=st.integers(0, 6))
    def roll_back(self, sequence: int, by: int) -> None:
        length = max(0, len(self.texts[sequence]) - by)
        self.slots.truncate(sequence, length)
        del self.texts[sequence][length:]

    @rule(num_tokens=st.integers(1, 3 * GROWTH))
    def reserve(self, num_tokens: int) -> None:
        self.slots.reserve(num_tokens)
        assert self.slots.capacity >= num_tokens

    @invariant()
    def holds_what_was_committed(self) -> None:
        self.slots.check_integrity()
        assert self.slots.num_open == len(self.texts)
        assert sorted(map(self.slots.slot, self.texts)) == list(range(len(self.texts)))
        for sequence, text in self.texts.items():
            assert tags_of(self.slots, sequence) == text


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)
