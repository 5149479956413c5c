"""``foredraft profile``: what passes, drafts and the host cost on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli import options as shared
from foredraft.cli import output


def profile(
    model: shared.Model = shared.DEFAULT_MODEL,
    method: shared.Method = None,
    draft_model: shared.DraftModel = None,
    num_speculative_tokens: shared.NumSpeculativeTokens = None,
    speculative_config: shared.SpeculativeOptions = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure passes again that are in the cache folder.")] = (
        False
    ),
    plot: Annotated[Path | None, typer.Option(help="Also write a picture (PNG, SVG, PDF by its ending).")] = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    threads: shared.Threads = None,
) -> None:
    """Measure the target's passes by rows, tokens and context, a method's drafts, and the host's share.

    The passes are kept in the cache folder; the policy goodput chooses draft lengths by them. The last line of stdout
    is one JSON document.
    """
    chosen = shared.speculative_config(method, draft_model, num_speculative_tokens, speculative_config)
    if plot is not None:
        from foredraft.lab.plots import check_path

        check_path(plot)
    with output.progress() as tell:
        tell(f"loading {model}", 0.0)
        import torch

        from foredraft.engine.llm import LLM
        from foredraft.measure.profile import measure_profile

        with LLM(model, speculative_config=chosen, dtype=dtype, device=device, num_threads=threads) as llm:
            found = measure_profile(llm, refresh=refresh, threads=torch.get_num_threads(), tell=tell)
    from foredraft.measure.profile import profile_document, profile_grids
    from foredraft.measure.tables import rich_table

    console = output.wide_console()
    for grid in profile_grids(found):
        console.print(rich_table(grid), end="\n\n")
    if plot is not None:
        from foredraft.measure.profile_plot import plot_profile

        plot_profile(plot, found)
        typer.echo(f"wrote {plot}", err=True)
    output.echo_document(profile_document(found, shlex.join(["foredraft", *sys.argv[1:]])))
