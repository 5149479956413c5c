"""The result of a server's audit as a sentence, tables and one JSON document."""

from __future__ import annotations

import math
from typing import Any

from foredraft.lab.audit.remote.client import Endpoint
from foredraft.lab.audit.remote.greedy import GreedyResult, Likeness
from foredraft.lab.audit.remote.run import RemoteResult
from foredraft.lab.audit.remote.sampling import SamplingResult
from foredraft.lab.audit.statistics import Bet, MartingaleTest, visible_bias
from foredraft.measure.machine import versions
from foredraft.measure.tables import Grid, Section

MOST_ROWS = 20
LN_10 = math.log(10.0)


def headline(result: RemoteResult) -> str:
    """The verdict in plain words."""
    found = [_greedy_words(result.greedy)] if result.greedy else []
    found += [_sampling_words(each) for each in result.sampling]
    if not found:
        found = ["nothing could be tested"]
    ended = f" Ended early: {result.trouble}." if result.trouble else ""
    return f"{'FAULT' if result.convicted else 'No fault found' if result.num_tested else 'No verdict'}: " + (
        "; ".join(found) + "." + ended
    )


def _greedy_words(greedy: GreedyResult) -> str:
    if greedy.self_faults:
        worst = max(greedy.self_faults, key=lambda fault: fault.gap)
        return (
            f"greedy emits {len(greedy.self_faults)} tokens that are not the most likely by its own log-probabilities "
            f"(prompt {worst.prompt_index}, token {worst.position}: {worst.gap:.3g} behind)"
        )
    if greedy.num_compared:
        rest = "" if not greedy.divergences else f", at worst {greedy.verdict} in the others"
        return f"greedy is token-identical in {greedy.num_identical} of {greedy.num_compared} answers{rest}"
    return f"greedy emits the most likely token {greedy.num_checked} times out of {greedy.num_checked}"


def _sampling_words(found: SamplingResult) -> str:
    where = f"at temperature {found.plan.temperature:g}"
    if found.convicted:
        strongest = found.judge.panel.strongest
        bias = f", {strongest.bias:+.2%}" if isinstance(strongest, MartingaleTest) and strongest.bound == 1.0 else ""
        return (
            f"{where} its tokens do not follow its log-probabilities, certain after {found.num_tested} tokens "
            f"(strongest: {strongest.name}{bias})"
        )
    return f"{where} its {found.num_tested} tokens follow its log-probabilities"


def grids(result: RemoteResult) -> list[Grid]:
    """The tables: greedy answers that are not identical, then one table of tests for each temperature."""
    found = [_greedy_grid(result.greedy)] if result.greedy else []
    return [*found, *map(_sampling_grid, result.sampling)]


def _greedy_grid(greedy: GreedyResult) -> Grid:
    rows = [
        [str(fault.prompt_index), str(Likeness.FAULT), str(fault.position), repr(fault.emitted), "", f"{fault.gap:.4f}"]
        for fault in greedy.self_faults[:MOST_ROWS]
    ]
    rows += [
        [
            str(each.prompt_index),
            str(greedy.likeness(each)),
            str(each.position),
            repr(each.emitted),
            repr(each.other),
            "" if each.gap is None else f"{each.gap:.4f}",
        ]
        for each in greedy.divergences[:MOST_ROWS]
    ]
    rows = rows or [["all", str(Likeness.IDENTICAL) if greedy.num_compared else "own choice", "", "", "", ""]]
    noise = "not measured" if greedy.noise is None else f"{greedy.noise:.4f}"
    caption = (
        f"{greedy.num_answers} answers, {greedy.num_tokens} tokens; {greedy.num_checked} of them held against the "
        f"server's own log-probabilities. "
        + (f"{greedy.num_identical} of {greedy.num_compared} identical; noise {noise}." if greedy.num_compared else "")
    )
    columns = ["prompt", "verdict", "at token", "emitted", "other", "log-probability gap"]
    return Grid("Greedy", columns, 5, caption, [Section("", rows)])


def _sampling_grid(found: SamplingResult) -> Grid:
    panel = found.judge.panel
    rows = [_test_row(test, panel.limit) for test in panel.tests if test.num_observations]
    caption = (
        f"{found.num_answers} answers, {found.num_tested} tokens. bias: per token; seen: the smallest bias that "
        f"so many tokens show with probability 0.9; evidence: in powers of ten, convicting alone from "
        f"{panel.limit / LN_10:.1f} on. An exact server is convicted with a probability of at most "
        f"{panel.false_alarm_rate:g}."
    )
    return Grid(
        f"Temperature {found.plan.temperature:g}",
        ["test", "tokens", "bias", "z", "seen", "evidence"],
        1,
        caption,
        [Section("", rows)],
    )


def _test_row(test: Bet, limit: float) -> list[str]:
    if not isinstance(test, MartingaleTest):
        return [test.name, str(test.num_observations), "", "", "", f"{test.log_evidence / LN_10:.1f}"]
    return [
        test.name,
        str(test.num_observations),
        f"{test.bias:+.4f}",
        f"{test.z_score:+.1f}",
        f"{_seen(test, limit):.4f}",
        f"{test.log_evidence / LN_10:.1f}",
    ]


def _seen(test: MartingaleTest, limit: float) -> float:
    hidden = test.allowance / test.num_observations
    return visible_bias(test.num_observations, test.variance / test.num_observations, limit, test.bound) + hidden


def document(result: RemoteResult, command: str) -> dict[str, Any]:
    """Everything that was found, as plain data."""
    abilities = result.abilities
    return {
        "command": command,
        "convicted": result.convicted,
        "verdict": headline(result),
        "complete": result.trouble is None,
        "trouble": result.trouble,
        "server": _endpoint(result.options.endpoint),
        "against": None if result.options.against is None else _endpoint(result.options.against),
        "num_top_logprobs": abilities.num_top if abilities else None,
        "logprobs_include_temperature": abilities.processed if abilities else None,
        "false_alarm_rate": result.options.false_alarm_rate,
        "greedy": None if result.greedy is None else _greedy_document(result.greedy),
        "sampling": [_sampling_document(each) for each in result.sampling],
        "notes": result.notes,
        "versions": versions(),
    }


def _endpoint(endpoint: Endpoint) -> dict[str, Any]:
    return {"url": endpoint.url, "model": endpoint.model, "chat": endpoint.chat, "body": dict(endpoint.body)}


def _greedy_document(greedy: GreedyResult) -> dict[str, Any]:
    return {
        "verdict": str(greedy.verdict) if greedy.num_compared or greedy.convicted else "own choice",
        "num_answers": greedy.num_answers,
        "num_tokens": greedy.num_tokens,
        "num_checked": greedy.num_checked,
        "num_compared": greedy.num_compared,
        "num_identical": greedy.num_identical,
        "noise": greedy.noise,
        "self_faults": [
            {"prompt": each.prompt_index, "position": each.position, "token": each.emitted, "gap": each.gap}
            for each in greedy.self_faults
        ],
        "divergences": [
            {
                "prompt": each.prompt_index,
                "position": each.position,
                "token": each.emitted,
                "other": each.other,
                "gap": each.gap,
                "verdict": str(greedy.likeness(each)),
            }
            for each in greedy.divergences
        ],
    }


def _sampling_document(found: SamplingResult) -> dict[str, Any]:
    panel = found.judge.panel
    return {
        "temperature": found.plan.temperature,
        "convicted": found.convicted,
        "num_answers": found.num_answers,
        "num_tested": found.num_tested,
        "num_untestable": found.num_untestable,
        "conditional_on_top": found.conditional,
        "evidence_limit": panel.limit / LN_10,
        "tests": [
            {
                "name": test.name,
                "num_tokens": test.num_observations,
                **({"bias": test.bias, "z": test.z_score} if isinstance(test, MartingaleTest) else {}),
                "evidence": test.log_evidence / LN_10,
            }
            for test in panel.tests
        ],
    }
