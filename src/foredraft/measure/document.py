"""A benchmark's result as one JSON document, the last line of its output."""

from __future__ import annotations

from typing import Any

from foredraft.measure import machine
from foredraft.measure.bench import BenchResult
from foredraft.measure.options import needs_draft_model
from foredraft.measure.passes import pass_documents
from foredraft.measure.results import arm_document, batch_document, ratio_documents, ratios


def document(result: BenchResult, command: str) -> dict[str, Any]:
    """Everything that was measured, with all that it depends on; plain data, ready for ``json.dumps``.

    Args:
        command: what the user typed.
    """
    options = result.options
    has_draft_model = any(map(needs_draft_model, options.methods))
    return {
        "command": command,
        "model": options.model,
        "draft_model": (options.draft_model or options.model) if has_draft_model else None,
        "drafts_with_itself": has_draft_model and options.drafts_with_itself,
        "peer": options.peer,
        "policy": options.policy,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "dtype": result.dtype,
        "device": result.device,
        "threads": result.threads,
        "numerics": result.contract,
        "ceiling_tokens_per_s": round(result.ceiling_tokens_per_s, 1),
        "arms": [arm_document(each) for each in result.arms],
        "ratios": ratio_documents(ratios(result.arms)),
        "passes": pass_documents(result.passes),
        "batches": [batch_document(each) for each in result.batches],
        "versions": machine.versions(),
        "hardware": {**machine.cpu(), "accelerators": machine.accelerators()},
        "interrupted": result.interrupted,
        "total_s": round(result.total_s, 1),
    }
