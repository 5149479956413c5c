"""An audit of a server from its options to its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError, InvalidOptionError
from foredraft.lab.audit.remote.answers import INTERRUPTED
from foredraft.lab.audit.remote.client import Client, Endpoint
from foredraft.lab.audit.remote.greedy import GreedyResult, audit_greedy
from foredraft.lab.audit.remote.probe import Abilities, probe
from foredraft.lab.audit.remote.sampling import SamplingPlan, SamplingResult, audit_sampling
from foredraft.lab.audit.statistics import FALSE_ALARM_RATE

PROMPTS = (
    "List of the months, then the list again, then once more:\nJanuary, February, March, April, May, June,",
    "Once upon a time, in a village by the sea, there lived an old lighthouse keeper who",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
    "The history of bread begins",
    "Row, row, row your boat,\nGently down the stream,\nMerrily, merrily, merrily, merrily,\n",
    "Question: Why is the sky blue?\nAnswer:",
    '{"name": "Ann", "age": 31, "city": "Oslo"}\n{"name": "Ben", "age": 27, "city": "Rome"}\n{"name":',
    "Dear Sir or Madam,\n\nI am writing to",
)
"""Half of them invite repetition, which drafts live on."""

Tell = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """What is audited and how.

    Attributes:
        endpoint: the server.
        against: a second server or setting, for greedy output.
        temperatures: 0 is greedy.
        max_tokens: of one answer.
        num_tokens: to judge at each temperature above 0.
        top_logprobs: most likely tokens to ask for; None: as many as the server gives, up to 20.
        prompts: texts.
        concurrency: requests under way at a time.
        request_seed: first seed of the requests; None sends none.
        false_alarm_rate: probability that an exact server is convicted, over all temperatures, tests and looks.
        score_missing: ask for the log-probabilities of each token that comes without them, one request a token.
    """

    endpoint: Endpoint
    against: Endpoint | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 64
    num_tokens: int = 20_000
    top_logprobs: int | None = None
    prompts: tuple[str, ...] = PROMPTS
    concurrency: int = 4
    request_seed: int | None = None
    false_alarm_rate: float = FALSE_ALARM_RATE
    score_missing: bool = False

    def __post_init__(self) -> None:
        for name, value in (("max_tokens", self.max_tokens), ("num_tokens", self.num_tokens)):
            if value < 1:
                raise InvalidOptionError(f"{name}={value} is below 1")
        if not self.temperatures or min(self.temperatures) < 0.0:
            raise InvalidOptionError(f"temperatures={self.temperatures} must be numbers from 0 on, at least one")
        if self.endpoint.max_retries < 0 or self.endpoint.timeout_s <= 0.0:
            raise InvalidOptionError(
                f"max_retries={self.endpoint.max_retries} must be 0 or more, timeout={self.endpoint.timeout_s} above 0"
            )
        if self.concurrency < 1:
            raise InvalidOptionError(f"concurrency={self.concurrency} is below 1, which is one request at a time")
        if not 0.0 < self.false_alarm_rate < 1.0:
            raise InvalidOptionError(f"false_alarm_rate={self.false_alarm_rate} is outside (0, 1)")
        if self.top_logprobs is not None and self.top_logprobs < 3:
            raise InvalidOptionError(f"top_logprobs={self.top_logprobs} is below 3, with which no token can be judged")
        if self.score_missing and self.endpoint.chat:
            raise InvalidOptionError("score_missing continues a prompt at any token, which chat cannot; leave one out")
        if not self.prompts:
            raise InvalidOptionError("there are no prompts")
        for endpoint in (self.endpoint, self.against):
            if endpoint is not None and not endpoint.url.startswith(("http://", "https://")):
                raise InvalidOptionError(f"url={endpoint.url!r} is no web address; write http://host:port/v1")


@dataclass(slots=True)
class RemoteResult:
    """What was found, complete if ``trouble`` is None.

    Attributes:
        abilities: of the server; None if it could not even be asked.
        greedy: of temperature 0.
        sampling: of each temperature above 0.
        notes: what could not be tested and why, for people.
        trouble: why the audit ended before its time.
    """

    options: RemoteOptions
    abilities: Abilities | None = None
    greedy: GreedyResult | None = None
    sampling: list[SamplingResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trouble: str | None = None

    @property
    def convicted(self) -> bool:
        return any(each.convicted for each in (self.greedy, *self.sampling) if each is not None)

    @property
    def num_tested(self) -> int:
        """Tokens that anything was tested on."""
        greedy = self.greedy.num_checked + self.greedy.num_compared if self.greedy else 0
        return greedy + sum(each.num_tested for each in self.sampling)


def audit_server(
    options: RemoteOptions, tell: Tell, open_client: Callable[[Endpoint], Client] = Client
) -> RemoteResult:
    """Audit a server. Whatever ends it early, what was found so far comes back.

    Args:
        tell: called with a label and the part of the work that is done.
        open_client: makes the clients.
    """
    result = RemoteResult(options)
    try:
        with ExitStack() as stack:
            client = stack.enter_context(open_client(options.endpoint))
            tell("asking what the server can do", 0.0)
            result.abilities = probe(client, options.top_logprobs)
            result.notes += result.abilities.notes
            other = None
            if options.against is not None:
                second = stack.enter_context(open_client(options.against))
                other = second, probe(second, options.top_logprobs)
            for temperature in sorted(set(options.temperatures)):
                if temperature == 0.0:
                    _greedy(result, client, other, tell)
                else:
                    _sample(result, client, temperature, tell)
                if result.trouble:
                    break
    except (ForedraftError, KeyboardInterrupt) as error:
        result.trouble = str(error) or INTERRUPTED
    return result


def _greedy(result: RemoteResult, client: Client, other: tuple[Client, Abilities] | None, tell: Tell) -> None:
    options, abilities = result.options, result.abilities
    assert abilities is not None
    if not abilities.num_top and other is None:
        result.notes.append("greedy: nothing to compare with; name a second server with --against")
        return
    total = len(options.prompts)
    result.greedy = audit_greedy(
        client,
        abilities,
        options.prompts,
        options.max_tokens,
        options.concurrency,
        lambda done: tell(f"greedy: {done} of {total} prompts", done / total),
        other,
    )
    result.trouble = result.greedy.trouble
    if result.greedy.num_checked < result.greedy.num_tokens:
        missing = result.greedy.num_tokens - result.greedy.num_checked
        result.notes.append(f"greedy: {missing} of {result.greedy.num_tokens} tokens came without log-probabilities")


def _sample(result: RemoteResult, client: Client, temperature: float, tell: Tell) -> None:
    options, abilities = result.options, result.abilities
    assert abilities is not None
    if not abilities.num_top:
        return
    plan = SamplingPlan(
        temperature=temperature,
        prompts=options.prompts,
        max_tokens=options.max_tokens,
        num_tokens=options.num_tokens,
        concurrency=options.concurrency,
        request_seed=options.request_seed,
        score_missing=options.score_missing,
        false_alarm_rate=options.false_alarm_rate / sum(each > 0 for each in set(options.temperatures)),
    )
    label = f"temperature {temperature:g}: {{}} of {plan.num_tokens} tokens"
    found = audit_sampling(
        client, abilities, plan, lambda done: tell(label.format(done), min(1.0, done / plan.num_tokens))
    )
    result.sampling.append(found)
    result.trouble = found.trouble
    if found.conditional:
        result.notes.append(
            f"temperature {temperature:g}: its log-probabilities are those at temperature 1, so only the choice among "
            f"the {abilities.num_top - 2} most likely tokens is tested, not how often others are drawn"
        )
    if found.num_untestable:
        result.notes.append(
            f"temperature {temperature:g}: {found.num_untestable} of {found.num_tested + found.num_untestable} tokens "
            "could not be tested: hidden, outside those that are known, or without log-probabilities (with llama.cpp "
            "the drafted ones; --score-missing has them tested)"
        )
    if found.num_scored:
        result.notes.append(
            f"temperature {temperature:g}: the log-probabilities of {found.num_scored} tokens were asked for "
            f"afterwards; passes of two shapes differ there by {found.scoring_difference:.2g} in total variation on "
            "average, and twice that is allowed for"
        )


def read_prompts(file: Path) -> tuple[str, ...]:
    """Prompts of a file: JSONL with ``prompt`` or ``turns`` (the first is taken), else one a line.

    Raises:
        InvalidOptionError: it cannot be read, or a JSON line has neither.
    """
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(f"the prompts {file} cannot be read: {error}") from error
    if file.suffix != ".jsonl":
        return tuple(lines)
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            prompts.append(str(record["prompt"] if "prompt" in record else record["turns"][0]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InvalidOptionError(f"{file}, line {number} has neither 'prompt' nor 'turns'") from error
    return tuple(prompts)


def second_endpoint(
    first: Endpoint, url: str | None, model: str | None, body: Mapping[str, Any] | None
) -> Endpoint | None:
    """What ``--against`` and ``--against-body`` describe: another server, or the same one with other fields.

    The key goes to no other address than its own.
    """
    if url is None and body is None:
        return None
    return replace(
        first,
        url=url or first.url,
        model=model or first.model,
        body=first.body if body is None else body,
        api_key=first.api_key if url in (None, first.url) else "",
    )
