"""What is counted and timed, as formulas, each once. Plain numbers in and out; no torch.

Everything is computed from two lists of a run: the draft tokens of each target pass that delivered something
(0 is plain decoding), and the tokens that it emitted. A pass emits its accepted draft tokens, which are the
leading run of right ones, and one more: the recovered token after a rejection, or else the bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def common_prefix_len(left: Sequence[object], right: Sequence[object]) -> int:
    """How many leading items are equal. Of draft and target tokens, that is the number accepted."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs; None if the lists are equal.

    If one list is the beginning of the other, it is the length of the shorter one.
    """
    length = common_prefix_len(left, right)
    return None if length == len(left) == len(right) else length


def accepted_per_pass(emitted: Sequence[int]) -> list[int]:
    """Accepted draft tokens of each pass: all that it emitted but the recovered or bonus token."""
    return [max(0, count - 1) for count in emitted]


def acceptance_rate(accepted: Sequence[int], drafted: Sequence[int]) -> float | None:
    """Accepted draft tokens per draft token; None if nothing was drafted."""
    total = sum(drafted)
    return sum(accepted) / total if total else None


def acceptance_len(accepted: Sequence[int], drafted: Sequence[int]) -> float | None:
    """1 + accepted tokens per draft, over the passes that had a draft; None if none had."""
    drafts = [count for count, width in zip(accepted, drafted, strict=True) if width]
    return 1.0 + sum(drafts) / len(drafts) if drafts else None


def acceptance_per_position(accepted: Sequence[int], drafted: Sequence[int]) -> list[float]:
    """For each position of a draft: how often it was accepted when it was drafted.

    A token behind a rejected one counts as drafted and not accepted, so the rates never grow with the
    position among drafts of equal length.
    """
    rates = []
    for position in range(max(drafted, default=0)):
        reached = [count > position for count, width in zip(accepted, drafted, strict=True) if width > position]
        rates.append(sum(reached) / len(reached))
    return rates


def tokens_per_target_pass(num_tokens: int, num_target_passes: int) -> float:
    """Emitted tokens per pass of the target model; every pass counts, that over the prompt too."""
    return num_tokens / num_target_passes if num_target_passes else 0.0


def token_rate(num_tokens: int, total_s: float) -> float:
    """Tokens per second from the request's arrival to its last token, prefill included."""
    return num_tokens / total_s if total_s > 0 else 0.0


def decode_rate(num_tokens: int, first_s: float, total_s: float, num_first_tokens: int = 1) -> float:
    """Tokens per second without prefill: those after the first delivery, over the time after it.

    A first delivery of one token gives the familiar (n - 1) / (total - first). With a draft beside the
    prompt, the first delivery can hold more.

    Args:
        first_s: seconds from arrival to the first delivery.
        total_s: seconds from arrival to the last one.
    """
    decode_s = total_s - first_s
    return (num_tokens - num_first_tokens) / decode_s if decode_s > 0 else 0.0


def time_per_output_token(num_tokens: int, first_s: float, total_s: float, num_first_tokens: int = 1) -> float | None:
    """Seconds per token behind the first delivery (TPOT); None if there is no token behind it."""
    rate = decode_rate(num_tokens, first_s, total_s, num_first_tokens)
    return 1.0 / rate if rate > 0 else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Percentile between the nearest ranks, linear (numpy's default); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100.0
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def ratio(value: float | None, base: float | None) -> float | None:
    """``value / base``; None where either is missing or the base is 0."""
    return value / base if value is not None and base else None


def median_of(values: Sequence[float]) -> float:
    """Median, the mean of the middle two for an even number; 0 of nothing."""
    return median(values) if values else 0.0


def middle_index(values: Sequence[float]) -> int:
    """Index of the value in the middle (the lower of two), to speak of one real run and not of a mix."""
    ordered = sorted(range(len(values)), key=values.__getitem__)
    return ordered[(len(ordered) - 1) // 2]
