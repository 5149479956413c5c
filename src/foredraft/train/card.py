"""The model card of a trained head: where it comes from and what it reached, as README.md in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.target.zoo import ZOO
from foredraft.train.dataset import TextStore

if TYPE_CHECKING:
    from foredraft.train.run import TrainResult, TrainRun

IN_THE_ENGINE = {"draft": "draft_model"}
"""The engine's name of a method, where it has another one."""
UNKNOWN_LICENCE = "that of the target, see its own card"


def write_card(out: Path, run: TrainRun, store: TextStore, result: TrainResult, seconds: float) -> None:
    """Write README.md.

    Args:
        seconds: that the last process of the run took; texts of an earlier one not counted.
    """
    entry = ZOO.get(run.target.lower())
    target = entry.hub_id if entry else run.target
    licence = entry.licence if entry else UNKNOWN_LICENCE
    found = result.acceptance
    method = IN_THE_ENGINE.get(run.options.method, run.options.method)
    positions = range(1, len(found.rates) + 1)
    lines = [
        "---",
        f"license: {licence.split(',')[0].lower() if entry else 'other'}",
        *([f"base_model: {entry.hub_id}"] if entry else []),
        "tags: [speculative-decoding, foredraft]",
        "---",
        "",
        f"# A draft head for {target}: {run.options.method}",
        "",
        f"Made with foredraft for `{run.target}` (weights {store.meta.fingerprint}). It drafts tokens that the target "
        "then checks; the output stays the target's own.",
        "",
        f"    foredraft generate {run.target} --method {method} --draft-model PATH --chat 'Hello'",
        "",
        "| | |",
        "|---|---|",
        f"| command | `{run.command or 'train_head'}` |",
        f"| data | {result.plan.num_texts} texts, {result.num_tokens} answer tokens to train on: {store.meta.recipe} |",
        f"| training | {result.plan.num_updates} updates of at most {run.options.num_rows} rows, "
        f"{result.plan.dtype} products |",
        f"| time | {store.seconds / 60:.1f} min of writing the texts, {seconds / 60:.1f} min of the last process |",
        f"| size | {result.num_bytes / 1e6:.1f} MB |",
        f"| licence of the base | {licence} |",
        "",
        f"## Held-out acceptance ({result.num_held_out} texts)",
        "",
        "Rounds walked through as the engine does, greedy drafts against the target's own answers. An answer's first "
        "token comes from the pass over the prompt and is not counted.",
        "",
        "| position | " + " | ".join(map(str, positions)) + " |",
        "|---|" + "---|" * len(found.rates),
        "| accepted where reached | " + " | ".join(f"{rate:.3f}" for rate in found.rates) + " |",
        "",
        f"{found.tokens_per_pass:.2f} tokens a pass of the target, with drafts of {len(found.rates)} tokens.",
        "",
    ]
    out.mkdir(parents=True, exist_ok=True)
    (out / "README.md").write_text("\n".join(lines), encoding="utf-8")
