"""Fill a store with texts, piece by piece; a run that was killed goes on with the piece that it was at."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from foredraft.engine.llm import LLM
from foredraft.errors import InvalidOptionError
from foredraft.train.dataset import StoreMeta, TextStore
from foredraft.train.writer import Task, Writer

BATCH = 48


class Source(Protocol):
    """Where tasks come from; a piece is a function of its number and of what was asked before.

    Attributes:
        recipe: what the texts depend on, besides the target.
        num_pieces: how many there are; None is no limit.
    """

    recipe: str

    @property
    def num_pieces(self) -> int | None: ...

    def tasks(self, piece: int, seen: set[int]) -> list[Task]: ...


def load_writer(target: str, layers: Sequence[int], **options: Any) -> tuple[LLM, Writer]:
    """Load a target so that it can write.

    Args:
        layers: whose states are kept, counted as in ``target.features``.
        options: of :class:`~foredraft.config.EngineConfig`.

    Raises:
        InvalidOptionError: the model has no tokenizer.
    """
    llm = LLM(target, **{"max_num_seqs": BATCH, **options, "enable_prefix_caching": False})
    if llm.tokenizer is None:
        raise InvalidOptionError(f"{target} has no tokenizer, so it can write no texts to train on")
    return llm, Writer.of(llm, tuple(layers))


def open_store(directory: str | Path, llm: LLM, writer: Writer, source: Source) -> TextStore:
    """The store of a directory for what this source gives, made if it is not there.

    Raises:
        InvalidOptionError: the directory holds texts of another target, other layers or another recipe.
    """
    target = writer.engine.target
    meta = StoreMeta(
        target=llm.config.model,
        fingerprint=llm.loaded.fingerprint,
        layers=writer.engine.drafter.feature_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        recipe=source.recipe,
    )
    return TextStore(directory, meta)


def collect(
    store: TextStore,
    source: Source,
    writer: Writer,
    *,
    num_tokens: int | None = None,
    num_pieces: int | None = None,
    use_tqdm: bool = False,
) -> TextStore:
    """Add pieces until there are enough, or the source has no more. Texts that are there are never made again.

    With ``num_pieces=1`` first, :attr:`TextStore.tokens_per_second` says how many pieces there is time for.

    Args:
        num_tokens: of answers.
        use_tqdm: show a progress bar with the time left (the name is vLLM's).

    Raises:
        InvalidOptionError: neither number is given, or a whole piece brought no text.
    """
    if (num_tokens is None) == (num_pieces is None):
        raise InvalidOptionError(f"num_tokens={num_tokens} and num_pieces={num_pieces}: give one of the two")
    seen = store.prompts()
    total = num_tokens if num_pieces is None else min(num_pieces, source.num_pieces or num_pieces)
    assert total is not None
    with _bar(use_tqdm) as bar:
        line = bar.add_task("writing texts", total=total, texts=len(store), tokens=store.num_tokens)
        while source.num_pieces is None or store.num_pieces < source.num_pieces:
            done = store.num_pieces if num_tokens is None else store.num_tokens
            bar.update(line, completed=done, texts=len(store), tokens=store.num_tokens)
            if done >= total:
                break
            began = time.perf_counter()
            texts = writer.run(source.tasks(store.num_pieces, seen))
            if not texts:
                raise InvalidOptionError(
                    f"piece {store.num_pieces} brought no text: {store.meta.target} writes no requests that can be "
                    "answered, or repeats itself; give it a file of texts or chats"
                )
            store.append(texts, time.perf_counter() - began)
    return store


def _bar(show: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[texts]} texts, {task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
        disable=not show,
    )
