"""Many requests at once, their answers in order; what was answered before a server died is kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.lab.audit.remote.client import Client, Completion

INTERRUPTED = "interrupted"
"""Why an audit ended that the user stopped."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        index: place in the series.
        prompt_index: which prompt it is, of those of the audit.
        prompt: its text.
        options: of this request.
    """

    index: int
    prompt_index: int
    prompt: str
    options: Mapping[str, Any]


def answers(
    client: Client, asks: Iterable[Ask], concurrency: int, answer: Callable[[Ask], Completion] | None = None
) -> Generator[tuple[Ask, Completion]]:
    """Answers in the order of ``asks``, which are taken in no sooner than needed.

    Args:
        answer: how a request is answered, if in another way than by the client alone; called in threads.

    Raises:
        ServerGoneError, ServerRefusedError: the first one met, after the answers of the requests that were under
            way have been handed out.
    """
    get = answer or (lambda ask: client.complete(ask.prompt, ask.options))
    waiting: deque[tuple[Ask, Future[Completion]]] = deque()
    todo, trouble = iter(asks), None
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            while True:
                while trouble is None and len(waiting) < concurrency and (ask := next(todo, None)) is not None:
                    waiting.append((ask, pool.submit(get, ask)))
                if not waiting:
                    break
                ask, future = waiting.popleft()
                try:
                    found = future.result()
                except ForedraftError as error:
                    trouble = trouble or error
                else:
                    yield ask, found
        finally:
            for _, future in waiting:
                future.cancel()
            if waiting:
                client.close()
    if trouble is not None:
        raise trouble
