"""The target's cache as the scheduler sees it: room for sequences with their drafts, and prefixes for reuse."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from foredraft.engine.sequence import Sequence
from foredraft.errors import InvalidOptionError
from foredraft.target.forward import TargetModel


class CacheMemory:
    """Opens and closes the slots of an engine's sequences within a limit.

    Args:
        max_draft_tokens: most of a step and sequence.
        max_bytes: of keys and values; None is no limit.
        max_retained: texts of ended sequences that are kept for reuse; 0 turns reuse off.
        num_states: of how many layers the hidden states are kept with them.

    Raises:
        InvalidOptionError: not even one sequence of the longest kind fits.
    """

    def __init__(
        self, target: TargetModel, max_draft_tokens: int, max_bytes: int | None, max_retained: int, num_states: int = 0
    ):
        self._target, self._slots, self._max_draft_tokens = target, target.slots, max_draft_tokens
        self._num_states = num_states
        if max_retained and num_states:
            self._slots.keep_states(num_states, target.hidden_size)
        self._slots.limit(max_bytes, max_retained)
        if not self.fits(1, target.max_model_len):
            positions = target.num_positions(target.max_model_len, max_draft_tokens)
            needed = positions * self._slots.bytes_per_position
            raise InvalidOptionError(
                f"the key/value cache may take {(max_bytes or 0) / 2**30:.3f} GiB, and one sequence of max_model_len="
                f"{target.max_model_len} tokens needs {needed / 2**30:.3f} GiB; raise kv_cache_gb (on a GPU "
                "gpu_memory_utilization), or lower max_model_len"
            )

    def length(self, sequence_id: int) -> int:
        return self._slots.length(sequence_id)

    def fits(self, num_sequences: int, text_len: int) -> bool:
        return self._slots.fits(num_sequences, self._target.num_positions(text_len, self._max_draft_tokens))

    def open(self, sequence: Sequence, running: Seq[Sequence]) -> None:
        """Give a sequence a slot, with the entries of the longest prefix that is known.

        Args:
            running: all sequences that run, this one among them.
        """
        longest = max(len(each.token_ids) for each in running)
        self._slots.make_room(len(running), self._target.num_positions(longest, self._max_draft_tokens))
        texts = {each.sequence_id: each.token_ids for each in running if each is not sequence}
        cached = self._slots.open_with_prefix(sequence.sequence_id, sequence.token_ids, texts)
        if not sequence.metrics.num_preemptions:
            sequence.metrics.num_cached_tokens = cached

    def close(self, sequence: Sequence) -> None:
        """Free a sequence's slot, if it has one; what was given out of its text may be reused.

        Not where another engine on this target needs states that this one's passes do not give.
        """
        if sequence.sequence_id not in self._slots:
            return
        if self._slots.states is None or self._num_states:
            self._slots.retain(sequence.sequence_id, sequence.token_ids)
        else:
            self._slots.close(sequence.sequence_id)
