"""``foredraft chat``: a conversation at the terminal, or from a pipe, one line a message."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from foredraft.cli import decoding, options
from foredraft.errors import RequestError
from foredraft.types import SamplingParams

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM

HELP = "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(
    model: options.Model = options.DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour accepted, recovered and bonus tokens.")
    ] = False,
    method: options.Method = None,
    draft_model: options.DraftModel = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    speculative_options: options.SpeculativeOptions = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    numerics: options.Numerics = "invariant",
) -> None:
    """Talk with a model. /reset forgets the conversation, /quit ends, Ctrl-C stops an answer."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
    )
    speculative = options.speculative_config(method, draft_model, num_speculative_tokens, speculative_options)
    with decoding.load_llm(
        model, speculative, dtype=dtype, device=device, num_threads=threads, numerics=numerics
    ) as llm:
        _talk(llm, [{"role": "system", "content": system}] if system else [], params, show_drafts)


def _talk(llm: LLM, start: list[dict[str, str]], params: SamplingParams, show_drafts: bool) -> None:
    messages = list(start)
    llm.chat_token_ids([*start, {"role": "user", "content": "?"}])  # fails now if there is no chat template
    for line in _lines():
        if line == "/quit":
            break
        if line == "/reset":
            messages = list(start)
        elif line.startswith("/"):
            typer.echo(HELP, err=True)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(llm, messages, params, show_drafts)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    """Messages from the terminal with a prompt, or from a pipe without; ends with the input."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401  # gives input() its line editing

    typer.echo(HELP, err=True)
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo()


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, show_drafts: bool) -> str | None:
    """Print the answer as it comes; returns it, or None if the conversation has become too long."""
    console, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        follower = decoding.Follower(llm, "chat", llm.chat_token_ids(messages), params)
    except RequestError as error:
        notes.print(f"{error}. /reset forgets the conversation.", style="red", soft_wrap=True)
        return None
    answer: list[str] = []
    started = time.perf_counter()
    try:
        for _, pieces in decoding.follow(llm, [follower]):
            decoding.show(console, pieces, show_drafts)
            answer += [piece.text for piece in pieces]
    except KeyboardInterrupt:
        notes.print("\nstopped", style="dim")
    console.print()
    total_s = time.perf_counter() - started
    stats = decoding.stats_line([follower.sequence.metrics], total_s, llm.engine.contract)
    notes.print(stats, style="dim", soft_wrap=True)
    return "".join(answer)
