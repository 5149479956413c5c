"""A real HTTP server with the OpenAI API over a table language, which decodes speculatively, rightly or wrongly.

The language: 48 tokens; the next one depends on the last one alone. The draft model is a blurred copy of the table.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCAB_SIZE = 48
NUM_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class Behaviour:
    """How the server decodes, what it reports, and how it misbehaves as a server.

    Attributes:
        rule: ``plain``, ``rejection`` (right), ``target_fallback`` (after a rejection, draws from the target),
            ``soft_ratio`` (the draft is the likeliest token, the ratio uses its probability), ``favour`` (accepts
            a quarter of what should be rejected), ``shared_draw`` (the residual is drawn with the number that
            decided the acceptance).
        fixed_temperature: decodes with it, whatever is asked for.
        same_noise: every request draws the same random numbers.
        greedy_slip: at temperature 0, every so many tokens the second best is emitted.
        logit_noise: added to the table's logits, for a second server with other kernels.
        raw: reports log-probabilities before the temperature.
        num_top: most it lists; more is refused. 0: none at all.
        shape: ``columns`` (vLLM's completions), ``entries`` (llama.cpp's), ``emitted_first`` (vLLM's chat: the
            emitted token takes the last one's place).
        untold_drafts: log-probabilities for the first token of an answer alone, as llama.cpp while it drafts.
        hides_end: an answer may end, and the end token is counted but not listed.
        strict: refuses fields beyond OpenAI's.
        busy_every: each so manyth request is answered with 429 and Retry-After first.
        dies_after: answers so many requests, then drops every connection.
        key: bearer token that it wants.
    """

    rule: str = "rejection"
    fixed_temperature: float | None = None
    same_noise: bool = False
    greedy_slip: int = 0
    logit_noise: float = 0.0
    raw: bool = True
    num_top: int = 20
    shape: str = "columns"
    untold_drafts: bool = False
    hides_end: bool = False
    strict: bool = False
    busy_every: int = 0
    dies_after: int | None = None
    key: str = ""


class TableServer:
    """Serves until closed; counts what it was asked."""

    def __init__(self, behaviour: Behaviour):
        self.behaviour = behaviour
        generator = np.random.default_rng(0)
        self.logits = 2.0 * generator.standard_normal((VOCAB_SIZE, VOCAB_SIZE))
        self.logits[:, 0] = 0.0 if behaviour.hides_end else -1e4
        self.draft_logits = 0.6 * self.logits + 0.8 * generator.standard_normal(self.logits.shape)
        if behaviour.logit_noise:
            self.logits = self.logits + behaviour.logit_noise * generator.standard_normal(self.logits.shape)
        self.noise = np.random.default_rng(1)
        self.num_answers, self.num_requests, self.num_rejections = 0, 0, 0
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def decode(self, body: dict[str, Any]) -> list[tuple[int, np.ndarray]]:
        """The tokens of an answer, each with the log-probabilities that are reported for its place."""
        behaviour, asked = self.behaviour, float(body.get("temperature", 1.0))
        temperature = behaviour.fixed_temperature if behaviour.fixed_temperature is not None else asked
        generator = np.random.default_rng(5 if behaviour.same_noise else self.noise.integers(2**63))
        last, emitted = _prompt_ids(body)[-1], []
        while len(emitted) < int(body["max_tokens"]) and (not emitted or emitted[-1][0] != 0):
            if temperature == 0.0:
                order = np.argsort(-self.logits[last])
                slip = behaviour.greedy_slip and len(emitted) % behaviour.greedy_slip == behaviour.greedy_slip - 1
                tokens = [int(order[1 if slip else 0])]
            else:
                tokens = self._round(last, temperature, generator)
            for token in tokens:
                scale = 1.0 if behaviour.raw or asked == 0.0 else asked
                emitted.append((token, _log_softmax(self.logits[last] / scale)))
                last = token
                if token == 0:
                    break
        return emitted[: int(body["max_tokens"])]

    def _round(self, last: int, temperature: float, generator: np.random.Generator) -> list[int]:
        """One round of drafting and verification."""
        rule, tokens = self.behaviour.rule, []
        target, draft = (np.exp(_log_softmax(each / temperature)) for each in (self.logits, self.draft_logits))
        if rule == "plain":
            return [int(generator.choice(VOCAB_SIZE, p=target[last]))]
        for _ in range(NUM_DRAFT_TOKENS):
            p, q = target[last], draft[last]
            token = int(q.argmax() if rule == "soft_ratio" else generator.choice(VOCAB_SIZE, p=q))
            uniform = generator.random()
            accepted = uniform <= p[token] / q[token] or (rule == "favour" and generator.random() < 0.25)
            if not accepted:
                self.num_rejections += 1
                rest = p if rule == "target_fallback" else np.maximum(p - q, 0.0)
                cumulative = np.cumsum(rest / rest.sum())
                draw = uniform if rule == "shared_draw" else generator.random()
                return [*tokens, min(int(np.searchsorted(cumulative, draw)), VOCAB_SIZE - 1)]
            tokens.append(token)
            last = token
        return [*tokens, int(generator.choice(VOCAB_SIZE, p=target[last]))]

    def choice(self, body: dict[str, Any], chat: bool) -> tuple[dict[str, Any], int]:
        emitted = self.decode(body)
        listed = [each for each in emitted if each[0] != 0]
        num_top = int((body.get("top_logprobs") if chat else body.get("logprobs")) or 0)
        text = "".join(f" w{token}" for token, _ in listed)
        reason = "stop" if len(listed) < len(emitted) else "length"
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice.update({"message": {"role": "assistant", "content": text}} if chat else {"text": text})
        if num_top and self.behaviour.num_top:
            choice["logprobs"] = self._logprobs(listed, num_top, body)
        return choice, len(emitted)

    def _logprobs(self, listed: list[tuple[int, np.ndarray]], num_top: int, body: dict[str, Any]) -> dict[str, Any]:
        shape, with_ids = self.behaviour.shape, bool(body.get("return_tokens_as_token_ids"))
        content, columns = [], {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        for token, logprobs in listed:
            best = [int(index) for index in np.argsort(-logprobs, kind="stable")[:num_top]]
            if shape == "emitted_first":
                best = [token, *(other for other in best if other != token)][:num_top]
            elif shape == "columns":
                best = [token, *(other for other in best if other != token)]
            entries = [{"id": each, "token": f" w{each}", "logprob": float(logprobs[each])} for each in best]
            if shape == "emitted_first":
                entries = [{**each, "bytes": list(each["token"].encode())} for each in entries]
                for each in entries:
                    del each["id"]
            own = {"id": token, "token": f" w{token}", "logprob": float(logprobs[token])}
            content.append({**(own if shape == "entries" else entries[0]), "top_logprobs": entries})
            name = "token_id:{}" if with_ids else " w{}"
            columns["tokens"].append(name.format(token))
            columns["token_logprobs"].append(float(logprobs[token]))
            columns["top_logprobs"].append({name.format(each): float(logprobs[each]) for each in best})
        if self.behaviour.untold_drafts:
            content[1:] = [{**entry, "logprob": 0.0, "top_logprobs": []} for entry in content[1:]]
        return columns if shape == "columns" else {"content": content}


def _handler(server: TableServer) -> type[BaseHTTPRequestHandler]:
    behaviour = server.behaviour

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, document: dict[str, Any], **headers: str) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(data)),
                **headers,
            }.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(data)

        def refuse(self, status: int, message: str, **headers: str) -> None:
            self.answer(status, {"error": {"message": message, "code": status}}, **headers)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.num_requests += 1
                if behaviour.dies_after is not None and server.num_answers >= behaviour.dies_after:
                    self.close_connection = True
                    return
                if behaviour.busy_every and server.num_requests % behaviour.busy_every == 0:
                    self.refuse(429, "slow down", Retry_After="0.25")
                    return
                self.serve(body)

        def serve(self, body: dict[str, Any]) -> None:
            chat = self.path == "/v1/chat/completions"
            num_top = (body.get("top_logprobs") if chat else body.get("logprobs")) or 0
            if behaviour.key and self.headers.get("Authorization") != f"Bearer {behaviour.key}":
                self.refuse(401, "wrong key")
            elif self.path == "/tokenize" and not behaviour.strict:
                self.answer(200, {"tokens": _prompt_ids(body)})
            elif not chat and self.path != "/v1/completions":
                self.refuse(404, f"no path {self.path}")
            elif body["model"] != "table":
                self.refuse(404, f"The model `{body['model']}` does not exist.")
            elif behaviour.num_top and num_top > behaviour.num_top:
                self.refuse(400, f"logprobs may be at most {behaviour.num_top}")
            elif behaviour.strict and "top_k" in body:
                self.refuse(400, "Unrecognized request argument supplied: top_k")
            else:
                server.bodies.append(body)
                choice, num_tokens = server.choice(body, chat)
                server.num_answers += 1
                self.answer(200, {"choices": [choice], "usage": {"completion_tokens": num_tokens}})

    return Handler


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is nothing to report."""


@contextmanager
def serve(behaviour: Behaviour) -> Iterator[tuple[str, TableServer]]:
    """Run a server; yields its URL with ``/v1`` and the server."""
    table = TableServer(behaviour)
    http = _Quiet(("127.0.0.1", 0), _handler(table))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1", table
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def wait_briefly(seconds: float) -> None:
    """Stands in for ``time.sleep`` where waiting as long as asked would only cost time."""
    time.sleep(min(seconds, 0.01))


def _prompt_ids(body: dict[str, Any]) -> list[int]:
    """A text is one token, by its length; a list of ids is taken as it is."""
    prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    return prompt if isinstance(prompt, list) else [len(prompt) % (VOCAB_SIZE - 1) + 1]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
