"""One OpenAI-compatible server: requests with patience for limits, and answers as plain data.

``/v1/completions`` and ``/v1/chat/completions`` are spoken, not streamed. A request that is refused for its rate,
times out or loses its connection is sent again; what will not mend raises at once, with the server's own words.
"""

from __future__ import annotations

import email.utils
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from foredraft.errors import ForedraftError
from foredraft.lab.audit.remote.logprobs import Position, positions

_PASSING = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses that a later attempt may mend."""
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 120.0


class ServerRefusedError(ForedraftError):
    """The server answers, but not to this request: no such model or path, a wrong key, an option it does not know."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class ServerGoneError(ForedraftError):
    """The server stopped answering, and did not come back within the retries."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    Attributes:
        text: what a user sees.
        positions: the emitted tokens with their log-probabilities; empty if the server gave none.
        num_hidden: emitted tokens that the server counts but does not list, such as an end token.
        finish_reason: as the server says.
    """

    text: str
    positions: tuple[Position, ...]
    num_hidden: int
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how a server is asked.

    Attributes:
        url: up to and with ``/v1``.
        model: the name that the server knows.
        api_key: sent as a bearer token, if not empty.
        chat: ask ``/chat/completions``; otherwise ``/completions`` with the prompt's text as it stands.
        body: further fields of every request, such as an engine's own options.
        timeout_s: for one answer.
        max_retries: of one request.
    """

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    chat: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 120.0
    max_retries: int = 6


class Client:
    """Sends requests to an :class:`Endpoint`; may be used from several threads.

    Args:
        sleep: waits, in seconds; a test passes its own.
    """

    def __init__(self, endpoint: Endpoint, sleep: Callable[[float], None] = time.sleep):
        self.endpoint = endpoint
        self._sleep = sleep
        self._closed = False
        self._base = endpoint.url.rstrip("/")
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self._http = httpx2.Client(
            headers=headers,
            timeout=httpx2.Timeout(endpoint.timeout_s, connect=min(10.0, endpoint.timeout_s)),
            limits=httpx2.Limits(max_connections=None),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the connections go; requests under way fail, and none is sent again."""
        self._closed = True
        self._http.close()

    def complete(self, prompt: str | Sequence[int], options: Mapping[str, Any]) -> Completion:
        """Ask for one continuation.

        Args:
            prompt: text or, where the server takes them and ``chat`` is off, token ids.

        Raises:
            ServerRefusedError: the server does not take the request; its status and words are given.
            ServerGoneError: it stopped answering.
        """
        chat = self.endpoint.chat
        asked = (
            {"messages": [{"role": "user", "content": prompt}]}
            if chat
            else {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        )
        body = {"model": self.endpoint.model, **asked, **options, **self.endpoint.body}
        answer = self._post(f"{self._base}/{'chat/completions' if chat else 'completions'}", body)
        return _completion(answer, self.endpoint.url)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a prompt, by the path that vLLM and llama.cpp have beside ``/v1``.

        Raises:
            ServerRefusedError: this server has none.
        """
        body = {"model": self.endpoint.model, "prompt": text, "content": text, "add_special": True}
        url = f"{self._base.removesuffix('/v1')}/tokenize"
        found = self._post(url, body).get("tokens")
        if not isinstance(found, list) or not all(isinstance(token, int) for token in found):
            raise ServerRefusedError(f"{url} answers without token ids", 200)
        return found

    def _post(self, url: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        trouble, asked_to_wait_s = "", 0.0
        for attempt in range(self.endpoint.max_retries + 1):
            if attempt:
                backoff_s = _FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(1.0, 1.5)
                self._sleep(min(max(backoff_s, asked_to_wait_s), _LONGEST_WAIT_S))
            try:
                response = self._http.post(url, json=dict(body))
            except httpx2.TimeoutException as error:
                trouble = f"no answer within {self.endpoint.timeout_s:g} s ({type(error).__name__})"
            except httpx2.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
            except (httpx2.InvalidURL, httpx2.DecodingError) as error:
                raise ServerGoneError(f"{url}: {error}") from error
            else:
                if response.is_success:
                    return _json(response, url)
                trouble = f"status {response.status_code}: {_words(response)}"
                if response.status_code not in _PASSING:
                    raise ServerRefusedError(f"{url} answers with {trouble}", response.status_code)
                asked_to_wait_s = _retry_after_s(response)
            if self._closed:
                break
        raise ServerGoneError(f"{url} did not answer in {attempt + 1} attempts; the last: {trouble}")


def _completion(answer: Mapping[str, Any], url: str) -> Completion:
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        found = positions(choice)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ServerRefusedError(f"{url} answers in a shape that is not the OpenAI API's: {error!r}", 200) from error
    num_emitted = (answer.get("usage") or {}).get("completion_tokens")
    if num_emitted is None:
        num_emitted = len(found) + (choice.get("finish_reason") == "stop")
    num_hidden = max(0, num_emitted - len(found)) if found else 0
    return Completion(text or "", found, num_hidden, choice.get("finish_reason"))


def _json(response: httpx2.Response, url: str) -> Mapping[str, Any]:
    try:
        found = response.json()
    except ValueError as error:
        raise ServerRefusedError(f"{url} answers with something that is not JSON", response.status_code) from error
    if not isinstance(found, Mapping):
        raise ServerRefusedError(f"{url} answers with JSON that is not an object", response.status_code)
    return found


def _words(response: httpx2.Response) -> str:
    """The server's own message, in one line."""
    return " ".join(response.text.split())[:300]


def _retry_after_s(response: httpx2.Response) -> float:
    """Seconds that the server asks to wait: a number or a date (RFC 9110, 10.2.3); 0 without."""
    asked = response.headers.get("Retry-After", "")
    try:
        return max(0.0, float(asked))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0
