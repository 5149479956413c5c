"""Patience and errors of the client, against a server that answers from a script."""

from __future__ import annotations

import email.utils
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from foredraft.lab.audit.remote.answers import Ask, answers
from foredraft.lab.audit.remote.client import Client, Endpoint, ServerGoneError, ServerRefusedError
from foredraft.lab.audit.remote.probe import probe

from .table_server import Behaviour, serve, wait_briefly

GOOD = {"choices": [{"text": "ok", "logprobs": None, "finish_reason": "length"}]}
Script = list[tuple[int, dict[str, str], Any]]


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    """Answers each request with the next line: status, headers, body (seconds to wait, or a document)."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, headers, body = script.pop(0)
            if isinstance(body, float):
                time.sleep(body)
                body = GOOD
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def ask(script: Script, **changes: Any) -> tuple[str, list[float]]:
    waits: list[float] = []
    with scripted(script) as url, Client(Endpoint(url=url, model="m", **changes), sleep=waits.append) as client:
        return client.complete("hello", {"max_tokens": 1}).text, waits


def test_waits_as_long_as_asked_and_longer_each_time() -> None:
    at = email.utils.formatdate(time.time() + 30, usegmt=True)
    text, waits = ask(
        [(429, {"Retry-After": "7"}, {}), (503, {"Retry-After": at}, {}), (500, {}, b"oops"), (200, {}, GOOD)]
    )
    assert text == "ok"
    assert waits[0] == 7.0
    assert 25.0 < waits[1] <= 30.0
    assert 2.0 <= waits[2] <= 3.0


def test_a_slow_answer_is_asked_for_again_and_then_given_up() -> None:
    assert ask([(200, {}, 0.6), (200, {}, GOOD)], timeout_s=0.2)[0] == "ok"
    with pytest.raises(ServerGoneError, match=r"did not answer in 2 attempts.*no answer within 0.1 s"):
        ask([(200, {}, 0.4), (200, {}, 0.4)], timeout_s=0.1, max_retries=1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ((401, {}, {"error": "wrong key"}), "status 401.*wrong key"),
        ((404, {}, {"message": "The model `m` does not exist."}), "does not exist"),
        ((200, {}, b"<html>"), "not JSON"),
        ((200, {}, [1]), "not an object"),
        ((200, {}, {"choices": []}), "not the OpenAI API's"),
    ],
)
def test_what_does_not_mend_is_told_at_once(line: tuple[int, dict[str, str], Any], words: str) -> None:
    with pytest.raises(ServerRefusedError, match=words):
        ask([line])


def test_nobody_there() -> None:
    with (
        Client(Endpoint(url="http://127.0.0.1:9/v1", model="m", max_retries=2), sleep=lambda _: None) as client,
        pytest.raises(ServerGoneError, match=r"3 attempts; the last: ConnectError"),
    ):
        client.complete("hello", {})


def test_the_key_is_sent_and_not_shown() -> None:
    with serve(Behaviour(key="secret")) as (url, _):
        endpoint = Endpoint(url=url, model="table", api_key="secret")
        assert "secret" not in repr(endpoint)
        with Client(endpoint) as client:
            assert probe(client).num_top == 20
        with (
            Client(Endpoint(url=url, model="table", api_key="guess")) as client,
            pytest.raises(ServerRefusedError, match="wrong key"),
        ):
            probe(client)


def test_extra_fields_override_the_audit_s_own() -> None:
    with (
        serve(Behaviour()) as (url, server),
        Client(Endpoint(url=url, model="table", body={"top_k": -1, "user": "me"})) as client,
    ):
        client.complete("hello", {"top_k": 0, "max_tokens": 1})
        assert server.bodies[-1]["top_k"] == -1
        assert server.bodies[-1]["user"] == "me"


def test_answers_come_in_order_and_those_under_way_are_kept_when_a_server_dies() -> None:
    with serve(Behaviour(dies_after=9)) as (url, _):
        asks = (Ask(index, 0, "hello", {"max_tokens": 4, "logprobs": 5}) for index in range(100))
        seen = []
        with Client(Endpoint(url=url, model="table", max_retries=0), sleep=wait_briefly) as client:
            stream = answers(client, asks, 4)
            with pytest.raises(ServerGoneError):
                seen += stream
    # list += keeps what came before the error
    assert [asked.index for asked, _ in seen] == sorted(asked.index for asked, _ in seen)
    assert [len(answer.positions) for _, answer in seen] == [4] * 9


def test_a_server_without_log_probabilities_says_so() -> None:
    with serve(Behaviour(num_top=0)) as (url, _), Client(Endpoint(url=url, model="table")) as client:
        found = probe(client)
    assert found.num_top == 0
    assert "no log-probabilities" in found.notes[0]
