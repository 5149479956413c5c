"""``foredraft generate``: complete prompts, and show where the tokens come from."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from foredraft.cli import decoding, options
from foredraft.errors import InvalidOptionError
from foredraft.types import RequestMetrics, SamplingParams

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM


def generate(
    model: options.Model,
    prompt: Annotated[list[str] | None, typer.Argument(help="One or more; without any, read from stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt through the model's chat template.")] = False,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour accepted, recovered and bonus tokens.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens of a prompt.")] = 128,
    min_tokens: Annotated[int, typer.Option(help="No end before that many.")] = 0,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Once for tokens of the output.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="For each occurrence in the output.")] = 0.0,
    seed: options.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the output; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    prediction: Annotated[
        Path | None,
        typer.Option(help="File with the text that the output is expected to be like; method: prediction+ngram."),
    ] = None,
    method: options.Method = None,
    draft_model: options.DraftModel = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    speculative_options: options.SpeculativeOptions = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    numerics: options.Numerics = "invariant",
) -> None:
    """Complete prompts with a model; several prompts are decoded in one batch."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    if prediction is not None and method is None:
        method = "prediction+ngram"
    speculative = options.speculative_config(method, draft_model, num_speculative_tokens, speculative_options)
    if prediction is not None and "prediction" not in speculative.methods:
        raise InvalidOptionError(
            f"--prediction has no effect with method {speculative.method!r}; leave one of them out"
        )
    prompts = _read_prompts(prompt or [], file)
    expected = None if prediction is None else _read(prediction, "prediction")
    with decoding.load_llm(
        model, speculative, dtype=dtype, device=device, num_threads=threads, numerics=numerics
    ) as llm:
        _run(llm, prompts, expected, params, chat, show_drafts)


def _read_prompts(prompts: list[str], file: Path | None) -> list[str]:
    if prompts and file is not None:
        raise InvalidOptionError(f"there is a prompt and --file {file}; give one of them")
    if file is not None:
        prompts = [_read(file, "prompt")]
    elif not prompts:
        if sys.stdin.isatty():
            raise InvalidOptionError("there is no prompt; give it after the model, with --file, or on stdin")
        prompts = [sys.stdin.read()]
    if not all(prompts):
        raise InvalidOptionError("a prompt is empty; it needs at least one character")
    return prompts


def _read(file: Path, what: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(f"the {what} in {file} cannot be read: {error}") from error


def _run(
    llm: LLM, prompts: list[str], prediction: str | None, params: SamplingParams, chat: bool, show_drafts: bool
) -> None:
    """Decode, print and count. A lone prompt is printed as it comes, several in their order at the end."""
    console, notes = Console(highlight=False), Console(stderr=True, highlight=False)
    predicted = llm.prediction_token_ids(prediction or ())
    followers = [
        decoding.Follower(llm, str(index), _token_ids(llm, text, chat), params, predicted)
        for index, text in enumerate(prompts)
    ]
    pieces: dict[str, list[decoding.Piece]] = {follower.name: [] for follower in followers}
    interrupted = False
    started = time.perf_counter()
    try:
        for follower, new in decoding.follow(llm, followers):
            if len(prompts) == 1:
                decoding.show(console, new, show_drafts)
            pieces[follower.name] += new
    except KeyboardInterrupt:
        interrupted = True
    total_s = time.perf_counter() - started
    if len(prompts) > 1:
        for follower, text in zip(followers, prompts, strict=True):
            console.rule(f"{' '.join(text.split())[:60]}", align="left", characters="-")
            decoding.show(console, pieces[follower.name], show_drafts)
            console.print()
    else:
        console.print()
    if show_drafts:
        notes.print(decoding.legend(console))
    counted: list[RequestMetrics] = [follower.sequence.metrics for follower in followers]
    notes.print(decoding.stats_line(counted, total_s, llm.engine.contract), style="dim", soft_wrap=True)
    if interrupted:
        raise KeyboardInterrupt


def _token_ids(llm: LLM, text: str, chat: bool) -> list[int]:
    if chat:
        return llm.chat_token_ids([{"role": "user", "content": text}])
    if llm.tokenizer is None:
        raise InvalidOptionError(f"{llm.config.model} has no tokenizer, so it cannot be given a text")
    return list(llm.tokenizer(text)["input_ids"])
