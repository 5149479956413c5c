"""What ``generate`` and ``chat`` share: load a model, follow requests step by step, show and count tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from foredraft.config import SpeculativeConfig
from foredraft.measure import metrics
from foredraft.types import Request, RequestMetrics, SamplingParams, StepOutput

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM
    from foredraft.engine.sequence import Sequence as Running

KIND_STYLES = {"plain": "", "accepted": "green", "recovered": "yellow", "bonus": "cyan"}
"""Kinds of tokens: emitted without a draft, accepted from one, after a rejection, after a full acceptance."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one kind of token."""

    text: str
    kind: str


def load_llm(model: str, speculative: SpeculativeConfig, **options: Any) -> LLM:
    """Load a model with a note on stderr while that takes. Raises what :class:`LLM` raises."""
    console = Console(stderr=True)
    with console.status(f"loading {model}"):
        from foredraft.engine.llm import LLM

        return LLM(model, speculative_config=speculative, **options)


class Follower:
    """One request of an engine, with its text told apart by kind of token.

    The request is queued at once.

    Raises:
        RequestError: it cannot be served.
    """

    def __init__(
        self,
        llm: LLM,
        name: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        prediction_token_ids: tuple[int, ...] = (),
    ):
        from foredraft.engine.detokenize import Detokenizer

        self._engine = llm.engine
        self.sequence: Running = llm.engine.add_request(
            Request(name, list(token_ids), params, prediction_token_ids=prediction_token_ids)
        )
        self._texts = Detokenizer(llm.tokenizer, (), False, params.skip_special_tokens)
        self._waiting: deque[Piece] = deque()
        self._known_len = 0
        self._drafted, self._accepted = 0, 0

    @property
    def name(self) -> str:
        return self.sequence.request.request_id

    def abort(self) -> None:
        """End the request; what it has so far stays."""
        self._engine.abort(self.name)

    def take(self, output: StepOutput) -> list[Piece]:
        """What a step delivered, as pieces of one kind each."""
        counted = self.sequence.metrics
        drafted = counted.num_draft_tokens - self._drafted
        accepted = counted.num_accepted_tokens - self._accepted
        self._drafted, self._accepted = counted.num_draft_tokens, counted.num_accepted_tokens
        for index, token in enumerate(output.token_ids):
            self._texts.append(token)
            self._queue("accepted" if index < accepted else _last_kind(drafted, accepted))
        if output.finish_reason is not None:
            self._texts.finish()
            self._queue("plain")
        return list(self._cut(len(output.text)))

    def _queue(self, kind: str) -> None:
        text = self._texts.text[self._known_len :]
        self._known_len = len(self._texts.text)
        if text:
            self._waiting.append(Piece(text, kind))

    def _cut(self, size: int) -> Iterator[Piece]:
        """The next ``size`` characters: a stop string may hold back or cut what the tokens say."""
        while size > 0 and self._waiting:
            piece = self._waiting.popleft()
            if len(piece.text) > size:
                self._waiting.appendleft(Piece(piece.text[size:], piece.kind))
                piece = Piece(piece.text[:size], piece.kind)
            size -= len(piece.text)
            yield piece


def _last_kind(drafted: int, accepted: int) -> str:
    if not drafted:
        return "plain"
    return "bonus" if accepted == drafted else "recovered"


def follow(llm: LLM, followers: Sequence[Follower]) -> Iterator[tuple[Follower, list[Piece]]]:
    """Run the engine until the requests have ended, yielding what each step delivers.

    Left early, by Ctrl-C for one, it aborts what is still running.
    """
    by_name = {follower.name: follower for follower in followers}
    try:
        while llm.engine.has_unfinished_requests:
            for output in llm.engine.step():
                follower = by_name[output.request_id]
                yield follower, follower.take(output)
    finally:
        for follower in followers:
            follower.abort()


def show(console: Console, pieces: Sequence[Piece], with_drafts: bool) -> None:
    """Print text as it is; with drafts, in colours, or with accepted tokens in [ ] where there are none."""
    for piece in pieces:
        if not with_drafts:
            console.out(piece.text, end="", highlight=False)
        elif console.color_system is None:
            console.out(f"[{piece.text}]" if piece.kind == "accepted" else piece.text, end="", highlight=False)
        else:
            console.print(Text(piece.text, style=KIND_STYLES[piece.kind]), end="", soft_wrap=True)
    console.file.flush()


def legend(console: Console) -> Text:
    """What the colours of :func:`show` mean on this console."""
    if console.color_system is None:
        return Text("accepted draft tokens stand in [ ]")
    return Text(", ").join(Text(kind, style=style or "default") for kind, style in KIND_STYLES.items())


def stats_line(all_metrics: Sequence[RequestMetrics], total_s: float, contract: str) -> str:
    """One line of counts and rates over requests that ran together for ``total_s`` seconds."""
    tokens = sum(m.num_emitted_tokens for m in all_metrics)
    passes = sum(m.num_target_passes for m in all_metrics)
    drafted = sum(m.num_draft_tokens for m in all_metrics)
    accepted = sum(m.num_accepted_tokens for m in all_metrics)
    parts = [f"{tokens} tokens in {total_s:.2f} s, {metrics.token_rate(tokens, total_s):.1f} tok/s"]
    if len(all_metrics) == 1 and all_metrics[0].first_token_s is not None:
        first_s = all_metrics[0].first_token_s
        parts.append(f"first after {first_s:.2f} s")
    parts.append(f"{metrics.tokens_per_target_pass(tokens, passes):.2f} tokens per target pass")
    if drafted:
        parts.append(f"{accepted} of {drafted} draft tokens accepted")
    spent = {name: sum(getattr(m, f"{name}_s") for m in all_metrics) for name in ("draft", "target", "verify", "host")}
    if sum(spent.values()) > 0:
        parts.append(", ".join(f"{name} {s / sum(spent.values()):.0%}" for name, s in spent.items()))
    parts.append(contract)
    return "; ".join(parts)
