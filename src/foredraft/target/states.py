"""The states of sequences that cannot be cut: transformers' own cache objects, with snapshots to go back to.

    tokens     0 ............ 9 ............ 14 ........ 18
    snapshots  empty          after 9
    cache                                    | committed | fed by the last pass, not committed

A recurrent state holds every token that was fed. If some of them are not kept, the sequence goes back to its last
snapshot, and its length with it: the cache holds a prefix of the text as ever, and the next pass feeds the rest
again (replay). So lengths may fall behind what was committed, but never behind the last snapshot.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from foredraft.errors import RequestError

NUM_SNAPSHOTS = 2


@dataclass(slots=True)
class _Held:
    """One sequence: ``fed`` tokens are in ``cache`` (None is the empty state), ``length`` of them are committed."""

    cache: Any = None
    fed: int = 0
    length: int = 0
    snapshots: list[tuple[int, Any]] = field(default_factory=lambda: [(0, None)])


class StateSlots:
    """The states of one model's sequences. Lengths are changed by commit and truncate only, as in ``KVSlots``.

    Args:
        max_len: most tokens a sequence may hold.
    """

    def __init__(self, max_len: int):
        self.max_len = max_len
        self.states: Tensor | None = None
        self._held: dict[int, _Held] = {}

    @property
    def num_open(self) -> int:
        return len(self._held)

    def open(self, sequence_id: int) -> None:
        """Begin a sequence with the empty state."""
        if sequence_id in self._held:
            raise RequestError(f"sequence {sequence_id} already has a slot")
        self._held[sequence_id] = _Held()

    def close(self, sequence_id: int) -> None:
        del self._held[sequence_id]

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._held

    # -- as in KVSlots, where they do more ---------------------------------------------------------------

    def open_with_prefix(self, sequence_id: int, text: list[int], running: Mapping[int, list[int]]) -> int:
        """States are not shared by sequences: none begins with a prefix."""
        self.open(sequence_id)
        return 0

    def retain(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        self.close(sequence_id)

    def drop_retained(self) -> None:
        """Nothing is retained."""

    def keep_states(self, num_layers: int, hidden_size: int) -> None:
        """No sequence begins with another's prefix, so nobody asks for its hidden states."""

    def read_states(self, sequence_id: int) -> Tensor | None:
        return None

    def limit(self, max_bytes: int | None, max_retained: int) -> None:
        """States take the same room however long the text is; they are not limited by bytes."""

    def fits(self, num_sequences: int, num_tokens: int) -> bool:
        return True

    def make_room(self, num_sequences: int, num_tokens: int) -> None:
        """A state is made with its sequence."""

    # -- lengths: commit and rollback ------------------------------------------------------------------

    def length(self, sequence_id: int) -> int:
        """Tokens of a sequence that need not be fed again."""
        return self._held[sequence_id].length

    def commit(self, sequence_id: int, num_tokens: int, path: Sequence[int] = ()) -> None:
        """Keep the next ``num_tokens`` that the last pass fed, and of the draft behind them the tokens ``path``.

        If the pass fed more, the sequence goes back to its last snapshot.
        """
        assert list(path) == list(range(len(path))), "drafts of a state are chains"
        held = self._held[sequence_id]
        length = held.length + num_tokens + len(path)
        if num_tokens < 0 or length > min(held.fed, self.max_len):
            raise ValueError(
                f"commit of {num_tokens} + {len(path)} tokens would give sequence {sequence_id} a length of {length}; "
                f"it must stay within [{held.length}, {min(held.fed, self.max_len)}]"
            )
        held.length = length
        self.rewind(sequence_id)

    def truncate(self, sequence_id: int, length: int) -> int:
        """Roll a sequence back to ``length`` tokens, or to the snapshot before; returns the length it has then."""
        held = self._held[sequence_id]
        if not 0 <= length <= held.length:
            raise ValueError(
                f"cannot cut sequence {sequence_id} to {length} tokens: it holds {held.length}; "
                f"use a length in [0, {held.length}]"
            )
        held.length = length
        self.rewind(sequence_id)
        return held.length

    def rewind(self, sequence_id: int) -> None:
        """Bring the cache to the committed length, or if it holds more, both to the last snapshot before."""
        held = self._held[sequence_id]
        if held.fed == held.length:
            return
        while held.snapshots[-1][0] > held.length:
            held.snapshots.pop()
        held.length, snapshot = held.snapshots[-1]
        held.fed, held.cache = held.length, copy_state(snapshot)

    # -- what a pass does ------------------------------------------------------------------------------

    def cache(self, sequence_id: int) -> tuple[Any, int]:
        """The cache to be fed, and how many tokens it holds."""
        held = self._held[sequence_id]
        return held.cache, held.fed

    def advance(self, sequence_id: int, cache: Any, num_tokens: int) -> None:
        """``cache`` has taken in ``num_tokens`` more; they are scratch until they are committed."""
        held = self._held[sequence_id]
        held.cache, held.fed = cache, held.fed + num_tokens

    def replay_len(self, sequence_id: int) -> int:
        """Tokens between the last snapshot and what the cache holds now."""
        held = self._held[sequence_id]
        return held.fed - held.snapshots[-1][0]

    def take_snapshot(self, sequence_id: int) -> None:
        """Make what the cache holds now a place to go back to; the empty state and the last ones are kept."""
        held = self._held[sequence_id]
        held.snapshots.append((held.fed, copy_state(held.cache)))
        del held.snapshots[1:-NUM_SNAPSHOTS]

    # -- for tests -------------------------------------------------------------------------------------

    def read(self, sequence_id: int) -> list[tuple[Tensor, ...]]:
        """All tensors of a sequence's cache, a tuple per layer (or one for all if there are no layers)."""
        cache = self._held[sequence_id].cache
        parts = getattr(cache, "layers", None) or [cache]
        return [tuple(_tensors(part)) for part in parts]

    def check_integrity(self) -> None:
        """Assert the invariants of the book-keeping."""
        for held in self._held.values():
            places = [place for place, _ in held.snapshots]
            assert places[0] == 0
            assert places == sorted(places)
            assert places[-1] <= held.fed
            assert 0 <= held.length <= min(held.fed, self.max_len)


def copy_state(cache: Any) -> Any:
    """A copy that later passes do not change.

    Keys and values are shared: layers of the ``DynamicLayer`` family make new ones with ``torch.cat`` and never
    write into those that are there. All else is copied.
    """
    shared: dict[int, Any] = {}
    for layer in getattr(cache, "layers", None) or []:
        if isinstance(layer, DynamicLayer):
            shared |= {id(part): part for part in (layer.keys, layer.values) if part is not None}
    return copy.deepcopy(cache, shared)


def _tensors(part: Any) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, dict):
        part = part.values()
    elif not isinstance(part, list | tuple):
        part = vars(part).values() if hasattr(part, "__dict__") else ()
    return [tensor for item in part for tensor in _tensors(item)]
