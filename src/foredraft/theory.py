"""The formulas of speculative decoding, each once, with the paper and equation it comes from.

Pure Python on plain numbers and sequences of probabilities; imports nothing but the exceptions. Symbols in
the equations: alpha is the acceptance rate of a draft token, k the number of draft tokens, c the time of one
draft step divided by the time of one target step, p and q the target's and the drafter's distribution.

Papers: Leviathan, Kalman and Matias 2023 (arXiv 2211.17192); Chen et al. 2023 (2302.01318); Moulton and
Jiang 2018 (1809.04052); Daliri, Musco and Suresh 2024 (2408.07978); Liu et al. 2024, SmartSpec (2406.14066);
Chen et al. 2024, MagicDec (2408.11049); Williams, Waterman and Patterson 2009 (roofline); Kaplan et al. 2020
(2001.08361); Pope et al. 2022 (2211.05102).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from foredraft.errors import InvalidOptionError

_TIE = 1e-12


def _check(name: str, value: float, low: float, high: float, remedy: str) -> None:
    if not low <= value <= high:
        raise InvalidOptionError(f"{name}={value} is outside [{low:g}, {high:g}]; {remedy}")


def _check_rate(name: str, value: float) -> None:
    _check(name, value, 0.0, 1.0, "it is a probability")


def _check_count(name: str, value: int) -> None:
    _check(name, value, 0, math.inf, "it is a number of tokens; 0 is plain decoding")


def _check_cost(name: str, value: float) -> None:
    _check(name, value, 0.0, math.inf, "a cost cannot be negative")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0.0:
            raise InvalidOptionError(f"{name}={value} must be above 0")


# ---- tokens per target pass ------------------------------------------------------------------------------


def expected_tokens(acceptance_rate: float, num_draft_tokens: int) -> float:
    """Expected tokens emitted per target pass, the bonus token included: (1 - alpha^(k+1)) / (1 - alpha).

    Holds for acceptances that are independent and equally likely. Source: Leviathan et al., equation 1.
    """
    _check_rate("acceptance_rate", acceptance_rate)
    _check_count("num_draft_tokens", num_draft_tokens)
    if acceptance_rate == 1.0:
        return num_draft_tokens + 1.0
    return float(1.0 - acceptance_rate ** (num_draft_tokens + 1)) / (1.0 - acceptance_rate)


def position_acceptances(conditional_acceptances: Sequence[float]) -> list[float]:
    """Chance that position i is reached and accepted, from the chances of acceptance once it is reached."""
    for rate in conditional_acceptances:
        _check_rate("conditional acceptance", rate)
    return list(accumulate(conditional_acceptances, mul))


def expected_tokens_by_position(acceptances: Sequence[float]) -> float:
    """Expected tokens per target pass with no assumption of independence: 1 + sum of a_i.

    ``acceptances[i]`` is the marginal chance that draft token i is reached and accepted (so it never grows
    with i). It is the expectation of a count, hence exact. Equation 1 is the case a_i = alpha^i.
    """
    for rate in acceptances:
        _check_rate("acceptance", rate)
    return 1.0 + math.fsum(acceptances)


def saturation(acceptance_rate: float) -> float:
    """Tokens per target pass that no draft length exceeds: 1 / (1 - alpha); infinite at alpha = 1.

    Source: the limit of Leviathan et al., equation 1, for k without bound.
    """
    _check_rate("acceptance_rate", acceptance_rate)
    return math.inf if acceptance_rate == 1.0 else 1.0 / (1.0 - acceptance_rate)


# ---- speedup and draft length ----------------------------------------------------------------------------


def speedup(acceptance_rate: float, num_draft_tokens: int, draft_cost: float) -> float:
    """Expected speedup over plain decoding if a verify pass costs one target step: E[tokens] / (k c + 1).

    ``draft_cost`` is c: seconds of a draft step per second of a target step. Source: Leviathan et al.,
    Theorem 3.8.
    """
    _check_cost("draft_cost", draft_cost)
    return expected_tokens(acceptance_rate, num_draft_tokens) / (num_draft_tokens * draft_cost + 1.0)


def measured_speedup(
    acceptances: Sequence[float],
    *,
    plain_step_s: float,
    draft_step_s: float,
    verify_step_s: float,
    host_s: float = 0.0,
) -> float:
    """Speedup from measured seconds: E[tokens] T(1) / (k T_draft + T_verify(k+1) + T_host).

    ``acceptances`` are marginal per position, their number is k; ``verify_step_s`` is the target pass over
    k + 1 tokens, ``host_s`` all that the round does besides the two models. Source: SmartSpec's goodput
    divided by that of plain decoding (Liu et al. 2024).
    """
    _check_positive(plain_step_s=plain_step_s, verify_step_s=verify_step_s)
    _check_cost("draft_step_s", draft_step_s)
    _check_cost("host_s", host_s)
    round_s = len(acceptances) * draft_step_s + verify_step_s + host_s
    return expected_tokens_by_position(acceptances) * plain_step_s / round_s


def best_num_draft_tokens(acceptance_rate: float, draft_cost: float, *, limit: int = 20) -> int:
    """The draft length in 0..limit with the largest speedup; of equal ones the shortest.

    0 means that plain decoding is fastest. Source: Leviathan et al., section 3.5.
    """
    _check_count("limit", limit)
    best, best_speedup = 0, 1.0
    for num_draft_tokens in range(1, limit + 1):
        candidate = speedup(acceptance_rate, num_draft_tokens, draft_cost)
        if candidate > best_speedup * (1.0 + _TIE):
            best, best_speedup = num_draft_tokens, candidate
    return best


def continuous_best_num_draft_tokens(acceptance_rate: float, draft_cost: float) -> float:
    """Where the speedup, read as a function of a real draft length g, has its maximum; 0 if it only falls.

    Root of alpha^(g+1) (1 - ln(alpha) (g + 1/c)) = 1, the derivative of Theorem 3.8 of Leviathan et al. set
    to zero. The left side falls in g, so the root is unique; found by bisection to double precision.
    Infinite for a free draft (c = 0) or a perfect one (alpha = 1), whatever can be accepted at all.
    """
    _check_rate("acceptance_rate", acceptance_rate)
    _check_cost("draft_cost", draft_cost)
    if acceptance_rate == 0.0:
        return 0.0
    if acceptance_rate == 1.0 or draft_cost == 0.0:
        return math.inf if draft_cost < 1.0 else 0.0
    log_rate = math.log(acceptance_rate)

    def excess(length: float) -> float:
        survival = math.exp((length + 1.0) * log_rate)
        return survival * (1.0 - log_rate * (length + 1.0 / draft_cost)) - 1.0

    if excess(0.0) <= 0.0:
        return 0.0
    low, high = 0.0, 1.0
    while excess(high) > 0.0:
        low, high = high, 2.0 * high
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if excess(middle) > 0.0 else (low, middle)
    return 0.5 * (low + high)


def next_draft_token_pays(next_acceptance: float, tokens_now: float, extra_s: float, round_s: float) -> bool:
    """Whether one more draft token raises tokens per second: a_{k+1} / E[tokens] > dT / T.

    ``next_acceptance`` is the marginal acceptance of the token in question, ``tokens_now`` the expected
    tokens of the round without it, ``extra_s`` the time it adds to a round of ``round_s`` (any one unit).
    Derived from (E + a) / (T + dT) > E / T; needs no model of either.
    """
    _check_rate("next_acceptance", next_acceptance)
    _check_cost("extra_s", extra_s)
    _check_positive(tokens_now=tokens_now, round_s=round_s)
    return next_acceptance * round_s > extra_s * tokens_now * (1.0 + _TIE)


# ---- acceptance of one draft token -----------------------------------------------------------------------


def _pairs(target_probs: Sequence[float], draft_probs: Sequence[float]) -> list[tuple[float, float]]:
    if len(target_probs) != len(draft_probs):
        raise InvalidOptionError(
            f"target_probs has {len(target_probs)} entries and draft_probs {len(draft_probs)}; one vocabulary"
        )
    return list(zip(map(float, target_probs), map(float, draft_probs), strict=True))


def total_variation(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """Half the sum of |p - q|: the largest difference in the chance of any event; 0 same, 1 disjoint."""
    return 0.5 * math.fsum(abs(p - q) for p, q in _pairs(target_probs, draft_probs))


def rejection_acceptance(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """Acceptance under the rejection rule: sum of min(p, q) = 1 - TV.

    No rule that keeps the target's distribution accepts more. Source: Leviathan et al., Theorem 3.5; the
    same rule in Chen et al., Theorem 1.
    """
    return math.fsum(min(p, q) for p, q in _pairs(target_probs, draft_probs))


def match_acceptance(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """Acceptance if target and drafter draw on their own and equality accepts: sum of p q."""
    return math.fsum(p * q for p, q in _pairs(target_probs, draft_probs))


def coupled_acceptance(target_probs: Sequence[float], draft_probs: Sequence[float]) -> float:
    """Acceptance if both draw with the same Gumbel noise: sum_x 1 / sum_y max(p_y / p_x, q_y / q_x).

    Exact; x runs over the tokens that both can draw. A draw is the argmin of E_y / p_y over exponential E_y,
    so x wins both races if E_y is at least E_x times that maximum for every y. Source: Moulton and Jiang 2018
    (their similarity J_P); in speculative decoding Daliri, Musco and Suresh 2024.
    """
    pairs = _pairs(target_probs, draft_probs)
    return math.fsum(
        1.0 / math.fsum(max(other_p / p, other_q / q) for other_p, other_q in pairs)
        for p, q in pairs
        if p > 0.0 and q > 0.0
    )


def coupled_acceptance_bounds(target_probs: Sequence[float], draft_probs: Sequence[float]) -> tuple[float, float]:
    """Limits of :func:`coupled_acceptance` from the total variation alone: (1 - TV)/(1 + TV) and 1 - TV.

    Source: Daliri, Musco and Suresh 2024 (the lower one); the upper one holds for every coupling.
    """
    distance = total_variation(target_probs, draft_probs)
    return (1.0 - distance) / (1.0 + distance), 1.0 - distance


# ---- roofline of a decode step ---------------------------------------------------------------------------


def weight_read_s(num_params: float, bytes_per_param: float, bandwidth_bytes_per_s: float) -> float:
    """Seconds to stream every weight from memory once, the floor of any target pass."""
    _check_positive(num_params=num_params, bytes_per_param=bytes_per_param, bandwidth=bandwidth_bytes_per_s)
    return num_params * bytes_per_param / bandwidth_bytes_per_s


def ceiling_tokens_per_s(num_params: float, bytes_per_param: float, bandwidth_bytes_per_s: float) -> float:
    """Most tokens per second of one sequence decoded plainly, the KV cache not counted: 1 / weight read."""
    return 1.0 / weight_read_s(num_params, bytes_per_param, bandwidth_bytes_per_s)


def arithmetic_s(num_params: float, flops_per_s: float, num_tokens: float = 1.0) -> float:
    """Seconds of arithmetic of a pass over ``num_tokens``: 2 operations per parameter and token.

    Source: Kaplan et al. 2020, section 2.1; attention over the context is left out.
    """
    _check_positive(num_params=num_params, flops_per_s=flops_per_s, num_tokens=num_tokens)
    return 2.0 * num_params * num_tokens / flops_per_s


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_value: float = 2.0) -> float:
    """Bytes of KV cache that one token of context takes: 2 x layers x KV heads x head size x bytes.

    Source: Pope et al. 2022, section 3.3.
    """
    _check_positive(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, bytes_per_value=bytes_per_value
    )
    return 2.0 * num_layers * num_kv_heads * head_dim * bytes_per_value


def kv_share(weight_bytes: float, kv_bytes: float) -> float:
    """Part of a pass's memory traffic that is KV cache, both in bytes per pass (all sequences together)."""
    _check_positive(weight_bytes=weight_bytes)
    _check_cost("kv_bytes", kv_bytes)
    return kv_bytes / (weight_bytes + kv_bytes)


def compute_bound_batch(
    num_params: float,
    bytes_per_param: float,
    *,
    bandwidth_bytes_per_s: float,
    flops_per_s: float,
    kv_bytes_per_sequence: float = 0.0,
    tokens_per_sequence: float = 1.0,
) -> float:
    """Sequences in a pass from which its arithmetic takes longer than its memory traffic.

    Solves B t 2P/F = (P b + B kv) / bandwidth for B, where t counts the tokens per sequence in a pass (k + 1
    under speculation). Infinite if the KV cache of a sequence takes longer to read than its arithmetic, then
    no batch turns compute-bound. Source: roofline (Williams et al. 2009); the last case is MagicDec's.
    """
    _check_cost("kv_bytes_per_sequence", kv_bytes_per_sequence)
    per_sequence_s = arithmetic_s(num_params, flops_per_s, tokens_per_sequence)
    slack_s = per_sequence_s - kv_bytes_per_sequence / bandwidth_bytes_per_s
    if slack_s <= 0.0:
        return math.inf
    return weight_read_s(num_params, bytes_per_param, bandwidth_bytes_per_s) / slack_s
