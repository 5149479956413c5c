"""Options that several commands share, and how lists are written in them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from foredraft.config import SpeculativeConfig
from foredraft.errors import InvalidOptionError
from foredraft.methods import METHODS

DEFAULT_MODEL = "smollm2-135m-instruct"

Model = Annotated[str, typer.Argument(help="Folder, hub id or short name.")]
Method = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(METHODS)}, or several, as in ngram+draft_model.  "
        "[default: ngram, or draft_model with --draft-model]"
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(help="The draft model, or the head of eagle3, medusa, ...: folder, hub id or short name."),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option("--num-speculative-tokens", "-k", help="Most draft tokens of a pass; None: the method's own."),
]
SpeculativeOptions = Annotated[
    str | None,
    typer.Option(
        "--speculative-config", help="More options as JSON, such as '{\"suffix_decoding_max_cached_requests\": 100}'."
    ),
]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
Threads = Annotated[int | None, typer.Option(help="Of torch on the CPU.  [default: torch's own]")]
Numerics = Annotated[str, typer.Option(help="invariant (the same bits in any batch) or fast (the narrowest pass).")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the most likely tokens that together reach p.")]
MinP = Annotated[float, typer.Option(help="Drop tokens less likely than this times the most likely one.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: tokens of prompt and output less likely.")]
Seed = Annotated[int | None, typer.Option(help="With a seed, the tokens are those of plain decoding with it.")]


def speculative_config(
    method: str | None, draft_model: str | None, num_speculative_tokens: int | None, more: str | None = None
) -> SpeculativeConfig:
    """The drafter that the options describe; without a method, it follows from ``--draft-model``.

    Args:
        more: JSON of ``--speculative-config``; an option of its own on the command line goes before it.

    Raises:
        InvalidOptionError: they do not fit together.
    """
    options = json_options(more)
    draft_model = draft_model or options.get("model")
    chosen = method or options.get("method") or ("draft_model" if draft_model else "ngram")
    options |= {"method": chosen, "model": draft_model}
    if num_speculative_tokens is not None:
        if chosen == "none":
            raise InvalidOptionError(
                f"num_speculative_tokens={num_speculative_tokens} has no effect with method {chosen!r}; "
                "leave one of them out"
            )
        options["num_speculative_tokens"] = num_speculative_tokens
    return SpeculativeConfig.from_options(options)


def json_options(text: str | None) -> dict[str, Any]:
    """What ``--speculative-config`` says.

    Raises:
        InvalidOptionError: it is not a JSON object.
    """
    try:
        options = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InvalidOptionError(f"--speculative-config {text} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise InvalidOptionError(f"--speculative-config {text} is not an object, as in '{{\"prompt_lookup_max\": 3}}'")
    return options


def words(text: str) -> tuple[str, ...]:
    """A list as it is written in an option: separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(name: str, text: str) -> tuple[float, ...]:
    """A list of numbers.

    Raises:
        InvalidOptionError: one of them is no number.
    """
    try:
        return tuple(float(part) for part in words(text))
    except ValueError as error:
        raise InvalidOptionError(f"{name}={text!r} is not a list of numbers such as 0,1") from error


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """A list of whole numbers.

    Raises:
        InvalidOptionError: one of them is none.
    """
    try:
        return tuple(int(part) for part in words(text))
    except ValueError as error:
        raise InvalidOptionError(f"{name}={text!r} is not a list of whole numbers such as 1,8") from error
