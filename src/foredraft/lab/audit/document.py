"""An audit's result as one JSON document and as one page."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foredraft.lab.audit.charts import evidence_chart, pit_chart, z_chart
from foredraft.lab.audit.greedy import GreedyResult
from foredraft.lab.audit.run import AuditResult
from foredraft.lab.audit.sampling import SamplingResult
from foredraft.lab.audit.tables import grids, headline, verdict
from foredraft.measure import machine
from foredraft.measure.report import write_page


def document(result: AuditResult, command: str) -> dict[str, Any]:
    """Everything that was found, with all that it depends on; plain data.

    Args:
        command: what the user typed.
    """
    options = result.options
    return {
        "command": command,
        "lossless": result.is_lossless,
        "verdict": verdict(result),
        "model": options.model,
        "method": options.speculative.method,
        "draft_model": options.speculative.model,
        "num_speculative_tokens": options.speculative.max_draft_tokens,
        "false_alarm_rate": options.false_alarm_rate,
        "num_prompts": result.num_prompts,
        "greedy": None if result.greedy is None else _greedy(result.greedy),
        "sampling": [_sampling(each) for each in result.sampling],
        "dtype": result.dtype,
        "device": result.device,
        "threads": result.threads,
        "numerics": result.contract,
        "versions": machine.versions(),
        "hardware": {**machine.cpu(), "accelerators": machine.accelerators()},
        "interrupted": result.interrupted,
        "total_s": round(result.total_s, 1),
    }


def _greedy(result: GreedyResult) -> dict[str, Any]:
    return {
        "verdict": str(result.verdict),
        "num_texts": result.num_texts,
        "num_tokens": result.num_tokens,
        "num_draft_tokens": result.num_draft_tokens,
        "num_accepted_tokens": result.num_accepted_tokens,
        "smallest_gap": result.smallest_gap,
        "divergences": [{**asdict(each), "verdict": str(each.verdict)} for each in result.divergences],
        "total_s": round(result.total_s, 1),
    }


def _sampling(result: SamplingResult) -> dict[str, Any]:
    params = {name: value for name, value in asdict(result.params).items() if value not in (None, ())}
    return {
        "params": params,
        "rule": result.rule,
        "convicted": result.convicted,
        "reason": result.reason if result.convicted else None,
        "num_texts": result.num_texts,
        "num_tokens": result.num_tokens,
        "num_draft_tokens": result.num_draft_tokens,
        "num_accepted_tokens": result.num_accepted_tokens,
        "log10_evidence": result.evidence,
        "false_alarm_rate": result.false_alarm_rate,
        "noise": asdict(result.noise),
        "tests": [{**asdict(test), "certain": math.isinf(test.evidence)} for test in result.tests],
        "total_s": round(result.total_s, 1),
    }


def write_report(path: Path, result: AuditResult, found: dict[str, Any]) -> None:
    """Write the page; ``found`` is the JSON document."""
    pictures = []
    for each in result.sampling:
        if each.num_tokens:
            at = f"temperature {each.params.temperature:g}"
            pictures += [
                (f"Evidence, {at}", evidence_chart(each)),
                (f"Standard scores, {at}", z_chart(each)),
                (f"Uniformity, {at}", pit_chart(each)),
            ]
    lead = headline(result, found["hardware"]["cpu"])
    write_page(path, f"foredraft audit: {result.options.model}", lead, pictures, grids(result), found)
