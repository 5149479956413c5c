"""llama.cpp's server; ``model`` is a GGUF file, ``server`` the binary, ``modes`` maps one name to its arguments.

The server's own clock is used. Prompts are not cached, so each request feeds its prompt.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from worker import Pipe, settings

START_LIMIT_S = 120


def main() -> None:
    asked = settings()
    pipe = Pipe()
    [(name, arguments)] = asked["modes"].items()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(asked["threads"])
    server = subprocess.Popen(
        [
            asked["server"], "-m", asked["model"], "-t", threads, "-tb", threads, "-c", "2048", "-np", "1",
            "--host", "127.0.0.1", "--port", str(port), "--cache-ram", "0", *arguments,
        ],
        stdin=subprocess.DEVNULL, stdout=sys.stderr,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_loaded(server, url)
        version = post(url, "/props", None)["build_info"]
        pipe.serve({name: lambda prompt, n: complete(url, prompt, n)}, versions={"llama.cpp": version}, dtype="bf16")
    finally:
        server.terminate()
        server.wait()


def complete(url: str, prompt_token_ids: list[int], max_tokens: int) -> dict[str, Any]:
    answer = post(
        url,
        "/completion",
        {
            "prompt": prompt_token_ids, "n_predict": max_tokens, "temperature": 0.0, "top_k": 1, "ignore_eos": True,
            "cache_prompt": False, "return_tokens": True,
        },
    )  # fmt: skip
    timings = answer["timings"]
    return {
        "token_ids": answer["tokens"],
        "first_s": timings["prompt_ms"] / 1000,
        "total_s": (timings["prompt_ms"] + timings["predicted_ms"]) / 1000,
        "num_first_tokens": 1,
        "num_drafts": None,
        "num_draft_tokens": timings.get("draft_n"),
        "num_accepted_tokens": timings.get("draft_n_accepted"),
    }


def post(url: str, path: str, body: Any) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    ) as reply:
        return dict(json.loads(reply.read()))


def wait_until_loaded(server: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {server.returncode}")
        try:
            if post(url, "/health", None).get("status") == "ok":
                return
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.2)
    raise RuntimeError(f"llama-server did not load its model within {START_LIMIT_S} s")


if __name__ == "__main__":
    main()
