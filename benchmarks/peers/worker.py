"""The engine's end of the pipe from run.py; standard library only, for it runs in every peer's environment.

An engine's script is started with one argument, a JSON object with ``model``, ``threads``, ``dtype`` and ``modes``. It
says what it is, then answers one request after the other, a line of JSON each:

    asked       {"mode": name, "prompt_token_ids": [...], "max_tokens": n}
    answered    {"token_ids": [...], "first_s": ..., "total_s": ..., "num_first_tokens": ..., "num_drafts": ...,
                 "num_draft_tokens": ..., "num_accepted_tokens": ..., more that the engine can tell}

Decoding is greedy, end tokens are ignored. Seconds run from the call to the first and to the last delivery. Counts that
an engine does not tell are None.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Generate = Callable[[list[int], int], dict[str, Any]]
"""From prompt tokens and the number of new tokens to the answer."""


class Pipe:
    """To be made before the engine is imported: what the engine prints from then on goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def serve(self, modes: Mapping[str, Generate], **about: Any) -> None:
        """Answer until stdin ends."""
        self._write(about)
        for line in sys.stdin:
            asked = json.loads(line)
            self._write(modes[asked["mode"]](asked["prompt_token_ids"], asked["max_tokens"]))

    def _write(self, answer: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()


def settings() -> dict[str, Any]:
    """What run.py asks this process to be."""
    return dict(json.loads(sys.argv[1]))
