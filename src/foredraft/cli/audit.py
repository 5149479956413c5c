"""``foredraft audit``: is an engine lossless? Exit status 0 if nothing speaks against it, 1 if something does."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import audit_server as remote
from foredraft.cli import options as shared
from foredraft.cli import output
from foredraft.types import SamplingParams

if TYPE_CHECKING:
    from foredraft.lab.audit.run import AuditResult

UNSOUND = 1


def audit(
    ctx: typer.Context,
    model: shared.Model = shared.DEFAULT_MODEL,
    method: shared.Method = None,
    draft_model: shared.DraftModel = None,
    num_speculative_tokens: shared.NumSpeculativeTokens = None,
    rule: Annotated[
        str, typer.Option(help="auto (coupled with --seed, else rejection), rejection, block, coupled, match, typical.")
    ] = "auto",
    allow_lossy: Annotated[bool, typer.Option("--allow-lossy", help="Needed to audit the rule typical.")] = False,
    temperature: Annotated[
        str, typer.Option(help="0 audits greedy decoding, others sampling; several as in 0,0.7,1.")
    ] = "0,1",
    tokens: Annotated[int, typer.Option(help="Judged at each temperature, unless a bias is certain before.")] = 20_000,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens of a text.")] = 96,
    batch_size: Annotated[int, typer.Option(help="Texts decoded together.")] = 16,
    prompts_file: Annotated[
        Path | None, typer.Option(help=".jsonl as bench takes it, or text with one prompt a line.")
    ] = None,
    top_k: shared.TopK = 0,
    top_p: shared.TopP = 1.0,
    min_p: shared.MinP = 0.0,
    repetition_penalty: shared.RepetitionPenalty = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Text i gets seed + i; without one, no two audits are alike.")
    ] = None,
    false_alarm_rate: Annotated[
        float, typer.Option(help="Probability that an exact engine is convicted, all tests together.")
    ] = 1e-6,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    threads: shared.Threads = None,
    numerics: shared.Numerics = "invariant",
    report: Annotated[Path | None, typer.Option(help="Also write a page (.html) with tables and pictures.")] = None,
    url: remote.Url = None,
    served_model: remote.ServedModel = None,
    against: remote.Against = None,
    against_model: remote.AgainstModel = None,
    body: remote.Body = None,
    against_body: remote.AgainstBody = None,
    chat: remote.Chat = False,
    concurrency: remote.Concurrency = 4,
    top_logprobs: remote.TopLogprobs = None,
    score_missing: remote.ScoreMissing = False,
    timeout: remote.Timeout = 120.0,
    max_retries: remote.MaxRetries = 6,
    api_key_env: remote.ApiKeyEnv = "OPENAI_API_KEY",
) -> None:
    """Hold every token against the target's own law. The last line of stdout is one JSON document.

    With --url the engine is somebody else's server, judged by the log-probabilities that it reports itself.
    Exit status 0: nothing speaks against the engine; 1: it is not lossless. Ctrl-C shows what was judged.
    """
    remote.check_options(ctx, url)
    if url is not None:
        remote.audit_url(
            url=url,
            served_model=served_model,
            against=against,
            against_model=against_model,
            body=body,
            against_body=against_body,
            chat=chat,
            concurrency=concurrency,
            top_logprobs=top_logprobs,
            score_missing=score_missing,
            timeout_s=timeout,
            max_retries=max_retries,
            api_key_env=api_key_env,
            temperature=temperature,
            num_tokens=tokens,
            max_tokens=max_tokens,
            prompts_file=prompts_file,
            seed=seed,
            false_alarm_rate=false_alarm_rate,
            report=report,
        )
        return
    from foredraft.lab.audit.options import AuditOptions
    from foredraft.measure.report import check_report_path

    speculative = shared.speculative_config(method, draft_model, num_speculative_tokens)
    options = AuditOptions(
        model=model,
        speculative=dataclasses.replace(speculative, acceptance_rule=rule, allow_lossy=allow_lossy, policy="fixed"),
        temperatures=shared.numbers("temperature", temperature),
        params=SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed),
        num_tokens=tokens,
        max_tokens=max_tokens,
        batch_size=batch_size,
        prompts_file=prompts_file,
        false_alarm_rate=false_alarm_rate,
        engine_options={"dtype": dtype, "device": device, "num_threads": threads, "numerics": numerics},
    )
    if report is not None:
        check_report_path(report)
    from foredraft.lab.audit.run import run_audit

    with output.progress() as tell:
        result = run_audit(options, tell)
    _show(result, report)
    if not result.is_lossless:
        raise typer.Exit(UNSOUND)
    if result.interrupted:
        raise KeyboardInterrupt


def _show(result: AuditResult, report: Path | None) -> None:
    """Verdict and tables, then the page if one is wanted, then the JSON document as the last line."""
    from foredraft.lab.audit.document import document, write_report
    from foredraft.lab.audit.tables import grids, headline
    from foredraft.measure.tables import rich_table

    found = document(result, shlex.join(["foredraft", *sys.argv[1:]]))
    console = output.wide_console()
    console.print(headline(result, found["hardware"]["cpu"]), end="\n\n", markup=False)
    for grid in grids(result):
        console.print(rich_table(grid), end="\n\n")
    if report is not None:
        write_report(report, result, output.finite(found))
        typer.echo(f"wrote {report}", err=True)
    output.echo_document(found)
