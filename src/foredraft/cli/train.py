"""``foredraft train``: a draft head for a target, from its own words or from given texts."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options as shared
from foredraft.cli import output
from foredraft.errors import InvalidOptionError
from foredraft.train.methods import TRAINABLE

if TYPE_CHECKING:
    from foredraft.train.run import TrainResult


def train(
    method: Annotated[str, typer.Argument(help=f"One of {', '.join(TRAINABLE)}.")],
    out: Annotated[Path, typer.Option(help="Folder of the head; a run that was begun there goes on.")],
    target: Annotated[str, typer.Option(help="Folder, hub id or short name of the model.")] = shared.DEFAULT_MODEL,
    minutes: Annotated[float | None, typer.Option(help="For all of it: writing texts, training, measuring.")] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text or JSONL of chats, best of your own traffic; may be repeated. Or folders of texts of earlier "
            "runs, as in OUT/run/texts.  [default: the target writes questions and answers itself]"
        ),
    ] = None,
    num_updates: Annotated[int | None, typer.Option(help="Instead of as many as there is time for.")] = None,
    start_from: Annotated[Path | None, typer.Option(help="Begin with the weights of an earlier run's --out.")] = None,
    seed: Annotated[int, typer.Option(help="Of texts, weights, order and noise.")] = 0,
    num_steps: Annotated[int, typer.Option(help="eagle3, eagle, mtp: how far it is unrolled in the end.")] = 3,
    num_heads: Annotated[int, typer.Option(help="medusa, mlp: heads, one for each place.")] = 4,
    tie_weights: Annotated[bool, typer.Option(help="mlp: one embedding and projection for all of them.")] = True,
    num_layers: Annotated[int, typer.Option(help="draft, pard: of the target's; dflash: of its own.")] = 3,
    num_places: Annotated[int, typer.Option(help="pard, dflash: tokens that one pass drafts.")] = 7,
    num_rows: Annotated[int, typer.Option(help="Tokens of an update.")] = 576,
    window: Annotated[int, typer.Option(help="Most tokens of a text that are read together.")] = 512,
    learning_rate: Annotated[float, typer.Option(help="Of the body.")] = 1e-3,
    head_learning_rate: Annotated[float, typer.Option(help="Of the projection to the vocabulary.")] = 3e-4,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.01,
    noise: Annotated[float, typer.Option(help="Added to the states that are read, in their deviations.")] = 0.1,
    dropout: Annotated[float, typer.Option(help="Share of the states' numbers that are left out.")] = 0.0,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Tokens that can be drafted.  [default: by the target's size]")
    ] = None,
    held_out: Annotated[float, typer.Option(help="Share of the texts to measure on.")] = 0.04,
    device: Annotated[str, typer.Option(help="cpu, or auto for what accelerate finds.")] = "auto",
    threads: shared.Threads = None,
) -> None:
    """Train a draft head. Killed and started again with the same options it goes on where it was, and ends the same.

    On several devices: accelerate launch --num_processes 2 --no_python foredraft train ...
    """
    from foredraft.train.options import TrainOptions

    if device not in ("auto", "cpu"):
        raise InvalidOptionError(f"device={device!r} is neither auto nor cpu; choose a GPU with CUDA_VISIBLE_DEVICES")
    chosen = TrainOptions(
        method=method,
        seed=seed,
        num_steps=num_steps,
        num_heads=num_heads,
        tie_weights=tie_weights,
        num_layers=num_layers,
        num_places=num_places,
        num_rows=num_rows,
        window=window,
        learning_rate=learning_rate,
        head_learning_rate=head_learning_rate,
        weight_decay=weight_decay,
        noise=noise,
        dropout=dropout,
        draft_vocab_size=draft_vocab_size,
        held_out=held_out,
    )
    for file in data or []:
        if not file.exists():
            raise InvalidOptionError(f"--data {file} does not exist")
    with output.progress() as tell:
        tell(f"loading {target}", 0.0)
        import torch

        from foredraft.train.run import TrainRun, train_head

        if threads is not None:
            torch.set_num_threads(threads)
        command = shlex.join(["foredraft", *sys.argv[1:]])
        run = TrainRun(
            target=target,
            out=out,
            options=chosen,
            minutes=minutes,
            num_updates=num_updates,
            data=tuple(data or ()),
            start_from=start_from,
            device=device,
            command=command,
        )
        result = train_head(run, tell)
    if result is None:  # another process of accelerate tells
        return
    _show(result, out)
    output.echo_document(document(result, command))


def document(result: TrainResult, command: str) -> dict[str, object]:
    """The last line of stdout."""
    found = result.acceptance
    return {
        "command": command,
        "num_updates": result.plan.num_updates,
        "num_texts": result.plan.num_texts,
        "num_tokens": result.num_tokens,
        "bytes": result.num_bytes,
        "acceptance_per_position": found.rates,
        "tokens_per_pass": found.tokens_per_pass,
        "history": result.history,
    }


def _show(result: TrainResult, out: Path) -> None:
    from rich.table import Table

    found = result.acceptance
    looks = [*result.history, {"update": "all held out", "loss": None, **_counts(found)}]
    table = Table(title="Held-out acceptance, by position where those before were accepted")
    for name in ("updates", "loss", *(str(i + 1) for i in range(len(found.rates))), "tokens a pass"):
        table.add_column(name, justify="right")
    for look in looks:
        rates = [f"{a / d:.3f}" if d else "-" for a, d in zip(look["accepted"], look["drafted"], strict=True)]
        loss = "" if look["loss"] is None else f"{look['loss']:.3f}"
        table.add_row(str(look["update"]), loss, *rates, f"{look['num_tokens'] / max(1, look['num_rounds']):.2f}")
    output.wide_console().print(table)
    typer.echo(f"wrote {out}, {result.num_bytes / 1e6:.1f} MB", err=True)


def _counts(found: object) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(found)  # type: ignore[call-overload, no-any-return]
