"""The driver's end of the pipe: one engine's process, which sleeps while another one is measured.

A process that is alive is not always idle: threads that wait for work may spin, and on a small machine that is enough
to ruin the others' figures. So a worker's whole process group is stopped (SIGSTOP) unless it is asked for something.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
START_LIMIT_S = 400.0


class Worker:
    """Starts an engine's script, waits until it is loaded, and puts it to sleep.

    Args:
        script: its file name in this folder.
        settings: see worker.py.
        environment: variables beside those of this process.

    Raises:
        RuntimeError: it ended instead, or was not ready in ``START_LIMIT_S``.

    Attributes:
        about: what the engine says of itself.
    """

    def __init__(self, python: str, script: str, settings: Mapping[str, Any], environment: Mapping[str, str]):
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            [python, str(HERE / script), json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True,
            env=os.environ | dict(environment),
        )  # fmt: skip
        self._name = script
        limit = threading.Timer(START_LIMIT_S, self._signal, [signal.SIGKILL])
        limit.start()
        try:
            self.about = self._answer()
        except BaseException:
            self._signal(signal.SIGKILL)
            raise
        finally:
            limit.cancel()
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def sleep(self) -> None:
        self._signal(signal.SIGSTOP)

    def generate(self, mode: str, prompt_token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        """An answer as in worker.py; the worker must be awake.

        Raises:
            RuntimeError: the engine has failed, or has made another number of tokens.
        """
        assert self._process.stdin is not None
        asked = {"mode": mode, "prompt_token_ids": prompt_token_ids, "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if len(answer["token_ids"]) != max_tokens:
            raise RuntimeError(f"{self._name}, {mode}: {len(answer['token_ids'])} tokens instead of {max_tokens}")
        return answer

    def close(self) -> None:
        """End the process and its children."""
        assert self._process.stdin is not None
        self.wake()
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        status = self._process.wait()
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace")[-6000:]
        raise RuntimeError(f"{self._name} ended with status {status}:\n{tail}")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, number)


def wait_until_idle(limit_s: float, most_busy: float = 0.05, sample_s: float = 0.4) -> float:
    """Wait until the machine does nothing else, or ``limit_s`` are over.

    Returns:
        the share of all processor time that others used in the last sample; above ``most_busy``, time is up.
    """
    until = time.monotonic() + limit_s
    while True:
        busy, total = _processor_time()
        time.sleep(sample_s)
        later_busy, later_total = _processor_time()
        share = (later_busy - busy) / max(1, later_total - total)
        if share <= most_busy or time.monotonic() > until:
            return share


def _processor_time() -> tuple[int, int]:
    """Ticks that the processors were busy, and all ticks, since the machine's start (Linux)."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    total = sum(fields)
    return total - fields[3] - fields[4], total
