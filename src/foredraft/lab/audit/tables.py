"""An audit's findings as tables, and its verdict in words."""

from __future__ import annotations

import math

from foredraft.lab.audit.greedy import Divergence, GreedyResult
from foredraft.lab.audit.run import AuditResult
from foredraft.lab.audit.sampling import SHOWN_BIASES, Finding, SamplingResult
from foredraft.measure.tables import Grid, Section


def grids(result: AuditResult) -> list[Grid]:
    """Greedy first, then each temperature."""
    greedy = [] if result.greedy is None else [greedy_grid(result.greedy)]
    return [*greedy, *map(sampling_grid, result.sampling)]


def headline(result: AuditResult, cpu_name: str) -> str:
    """What was audited, and the verdict."""
    speculative = result.options.speculative
    what = speculative.method + (
        f" with up to {speculative.max_draft_tokens} draft tokens" * (speculative.method != "none")
    )
    return (
        f"{result.options.model}, {what}, {result.dtype}, {result.device} ({cpu_name}), {result.threads} threads; "
        f"numerics: {result.contract}. {verdict(result)}"
    )


def verdict(result: AuditResult) -> str:
    """One or two sentences."""
    found = [] if result.greedy is None else [f"Greedy: {result.greedy.verdict}."]
    for each in result.sampling:
        at = f"Temperature {each.params.temperature:g}"
        if each.convicted:
            found.append(f"{at}: NOT the target's law, certain after {each.num_tokens:,} tokens ({each.reason}).")
        else:
            found.append(f"{at}: no bias found in {each.num_tokens:,} tokens.")
    if result.interrupted:
        found.append("Interrupted.")
    return " ".join(found) or "Nothing was judged."


def greedy_grid(result: GreedyResult) -> Grid:
    """The texts that part from plain decoding."""
    caption = (
        f"{result.num_texts} texts, {result.num_tokens:,} tokens; {_accepted(result)}. A token is behind by how far "
        "its logit lies below the best; within twice the noise of the place that is a near-tie, beyond it a fault. "
        f"Smallest gap between the two best logits anywhere: {result.smallest_gap:.3g}."
    )
    rows = [_divergence_row(divergence) for divergence in result.divergences]
    identical = result.num_texts - len(rows)
    summary = [f"{identical} texts", "token-identical", *[""] * 6]
    columns = ["prompt", "verdict", "position", "token", "plain", "gap", "behind", "noise"]
    return Grid("Greedy, against plain decoding", columns, 2, caption, [Section("", [summary, *rows])])


def _divergence_row(found: Divergence) -> list[str]:
    return [
        str(found.prompt),
        str(found.verdict),
        str(found.position),
        "end" if found.token is None else str(found.token),
        "end" if found.plain_token is None else str(found.plain_token),
        f"{found.gap:.3g}",
        f"{found.behind:.3g}",
        f"{found.noise:.3g}",
    ]


def sampling_grid(result: SamplingResult) -> Grid:
    """The tests; those that met no token are left out."""
    limit = math.log10(1.0 / result.false_alarm_rate)
    caption = (
        f"{result.num_texts} texts, {result.num_tokens:,} tokens; {_accepted(result)}. Evidence is a power of ten; "
        f"an average of {limit:.1f} over the tests convicts, which happens to an exact engine with a probability of "
        f"at most {result.false_alarm_rate:g}. Visible: the bias that so many tokens show with a probability of 0.9; "
        "then the tokens that would show a bias of that size."
    )
    if result.noise.logits:
        caption += (
            f" Logits of the same place differ by up to {result.noise.logits:.3g} between passes; a total variation "
            f"of {result.noise.total_variation:.2g} is allowed for that."
        )
    columns = ["", "tokens", "bias", "z", "evidence", "visible", *(f"for {bias:g}" for bias in SHOWN_BIASES)]
    rows = [_test_row(test) for test in result.tests if test.num_tokens]
    title = f"Sampling at temperature {result.params.temperature:g}, rule {result.rule}"
    return Grid(title, columns, 1, caption, [Section("", rows)])


def _test_row(test: Finding) -> list[str]:
    evidence = "certain" if math.isinf(test.evidence) else f"{test.evidence:+.1f}"
    if test.bias is None or test.z_score is None or test.visible_bias is None:
        return [test.name, f"{test.num_tokens:,}", "", "", evidence, "", *[""] * len(SHOWN_BIASES)]
    needed = [f"{tokens:,}" if tokens else "" for tokens in test.tokens_needed.values()]
    return [
        test.name,
        f"{test.num_tokens:,}",
        f"{test.bias:+.4f}",
        f"{test.z_score:+.2f}",
        evidence,
        f"{test.visible_bias:.3f}",
        *needed,
    ]


def _accepted(result: GreedyResult | SamplingResult) -> str:
    if not result.num_draft_tokens:
        return "nothing was drafted"
    return f"{result.num_accepted_tokens:,} of {result.num_draft_tokens:,} draft tokens accepted"
