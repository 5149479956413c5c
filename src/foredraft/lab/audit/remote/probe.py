"""What a server takes and tells, found out with a few requests before the audit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foredraft.lab.audit.remote.cells import EXCESS_MASS, excess_mass
from foredraft.lab.audit.remote.client import Client, Completion, ServerRefusedError

PROBE_PROMPT = "Once upon a time, in a village by the sea, there lived"
PROBE_TOKENS = 4
PROBE_TEMPERATURE = 2.0
UNFILTERED = {"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
UNFILTERED_ENGINES = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "return_tokens_as_token_ids": True}
"""What vLLM, SGLang and llama.cpp understand beyond OpenAI's own: their defaults may filter."""
NUMBERS_OF_TOP = (20, 10, 5, 3)
_SAME = 0.02
"""Log-probabilities of the same place in two requests differ by less, but for a change of temperature."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the server was found to do.

    Attributes:
        options: fields that every request carries: no filters, log-probabilities.
        num_top: most likely tokens that it lists; 0: none.
        processed: log-probabilities include the temperature; None: not known.
        knows_tokens: tokens come with ids or bytes, so that none are mixed up.
        notes: what cannot be tested and what to do about it, for people.
    """

    options: Mapping[str, Any]
    num_top: int
    processed: bool | None = None
    knows_tokens: bool = True
    notes: tuple[str, ...] = field(default=())

    def missing_temperature(self, temperature: float) -> float | None:
        """The temperature that the log-probabilities lack, for :func:`foredraft.lab.audit.remote.cells.cells`."""
        return None if temperature == 1.0 or self.processed else temperature


def probe(client: Client, num_top: int | None = None) -> Abilities:
    """Find out what the server takes.

    Args:
        num_top: ask for so many most likely tokens; None takes the most that are given, up to 20.

    Raises:
        ServerRefusedError: it does not take the plainest request either.
        ServerGoneError: it does not answer.
    """
    options, answer, listed = _first_answer(client, NUMBERS_OF_TOP if num_top is None else (num_top,))
    lists = [len(position.top) for position in answer.positions if position.top]
    if not listed or not lists:
        return Abilities(
            options, 0, notes=("it gives no log-probabilities, so nothing can be said about sampling from it",)
        )
    granted = min(listed, max(lists))
    notes = []
    if granted < listed:
        notes.append(f"asked for the {listed} most likely tokens, it lists {granted}")
    if excess_mass(answer.positions) > EXCESS_MASS:
        notes.append(
            "its log-probabilities add up to more than 1: they are no distribution, so expect a verdict of fault"
        )
    knows_tokens = not any(isinstance(key, str) for position in answer.positions for key in position.top)
    if not knows_tokens:
        notes.append("tokens come as text without ids; places where texts may coincide are left out")
    processed = _is_processed(client, options)
    if processed is None:
        notes.append("whether its log-probabilities include the temperature could not be found out; taken as if not")
    return Abilities(options, granted, processed, knows_tokens, tuple(notes))


def _first_answer(client: Client, numbers: tuple[int, ...]) -> tuple[dict[str, Any], Completion, int]:
    """The fullest request that the server takes, its answer, and the number of top tokens asked for."""
    refused: ServerRefusedError | None = None
    for extras in (UNFILTERED_ENGINES, {}):
        for number in (*numbers, 0):
            options = {**UNFILTERED, **extras, **_logprob_options(client.endpoint.chat, number)}
            try:
                answer = client.complete(PROBE_PROMPT, {**options, "temperature": 1.0, "max_tokens": PROBE_TOKENS})
            except ServerRefusedError as error:
                if error.status not in (400, 422):
                    raise
                refused = refused or error
            else:
                if number or extras == {}:
                    return options, answer, number
    assert refused is not None
    raise refused


def _logprob_options(chat: bool, number: int) -> dict[str, Any]:
    if not number:
        return {}
    return {"logprobs": True, "top_logprobs": number} if chat else {"logprobs": number}


def _is_processed(client: Client, options: Mapping[str, Any]) -> bool | None:
    """Whether another temperature changes the log-probabilities of the first place after the same prompt."""
    plain, hot = (
        client.complete(PROBE_PROMPT, {**options, "temperature": temperature, "max_tokens": 1}).positions
        for temperature in (1.0, PROBE_TEMPERATURE)
    )
    if not plain or not hot or not plain[0].top:
        return None
    common = [key for key in plain[0].top if key in hot[0].top]
    if len(common) < 2:
        return None
    spread = max(common, key=lambda key: plain[0].top[key]), min(common, key=lambda key: plain[0].top[key])
    gap, hot_gap = (found[0].top[spread[0]] - found[0].top[spread[1]] for found in (plain, hot))
    if math.isclose(gap, hot_gap, abs_tol=_SAME + 0.02 * gap):
        return False
    return True if math.isclose(gap / PROBE_TEMPERATURE, hot_gap, abs_tol=_SAME + 0.02 * gap) else None
