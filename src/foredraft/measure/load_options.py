"""What a benchmark under load is asked to do, checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.config import NUMERICS, SpeculativeConfig, check_method
from foredraft.errors import InvalidOptionError
from foredraft.measure.load_prompts import ROUTES
from foredraft.measure.options import DTYPES, check_choices, check_range, needs_draft_model

ARRIVALS = ("closed", "poisson")
PLAIN, AUTO = "plain", "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Settings of ``foredraft bench --concurrency``.

    Attributes:
        model: folder, hub id or short name.
        method: the drafter of all arms but plain.
        draft_model: for the method of that name; None drafts with the target itself.
        num_speculative_tokens: most draft tokens of the arm auto; None is the method's default.
        speculative_config: more options of the arm auto.
        draft_lens: the arms with a fixed draft length.
        arrivals: ``closed``: so many clients, each sends its next request when the last one ended. ``poisson``:
            requests arrive at a rate, whether or not others have ended.
        concurrency: clients, one level after the other; for ``closed``.
        rates: requests per second, one level after the other; for ``poisson``.
        routes: built-in kinds of requests, in turn; not used with ``dataset``.
        dataset, per_category: the user's JSONL file; a category is a route.
        num_requests: that each arm completes in a round; None takes one a client, but at least one of each route
            (``poisson``: 16).
        max_tokens: mean number of new tokens; each request has its own, from half to one and a half of it.
        temperature: 0 is greedy.
        repeats: rounds over all levels and arms.
        time_limit_s: no level of a round begins that would end later; the first round always runs. 0 is no limit.
    """

    model: str
    method: str = "ngram"
    draft_model: str | None = None
    num_speculative_tokens: int | None = None
    speculative_config: Mapping[str, Any] = field(default_factory=dict)
    draft_lens: tuple[int, ...] = (1, 3, 5, 7)
    arrivals: str = "closed"
    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    routes: tuple[str, ...] = ROUTES
    dataset: Path | None = None
    per_category: int | None = None
    num_requests: int | None = None
    max_tokens: int = 96
    temperature: float = 0.0
    repeats: int = 3
    time_limit_s: float = 540.0
    seed: int = 0
    dtype: str = "auto"
    threads: int | None = None
    numerics: str = "invariant"

    def __post_init__(self) -> None:
        check_choices("arrivals", [self.arrivals], ARRIVALS)
        check_choices("numerics", [self.numerics], NUMERICS)
        check_choices("dtype", [self.dtype], DTYPES)
        check_method(self.method)
        check_choices("routes", self.routes, ROUTES)
        if self.method == "none":
            raise InvalidOptionError("method='none' drafts nothing; plain is always run, name a method that drafts")
        if self.draft_model is not None and not needs_draft_model(self.method):
            raise InvalidOptionError(f"draft_model={self.draft_model!r} has no effect on the method {self.method}")
        if not self.draft_lens or not (self.routes or self.dataset):
            raise InvalidOptionError("draft_lens and routes need at least one entry each")
        if self.per_category is not None and self.dataset is None:
            raise InvalidOptionError(f"per_category={self.per_category} has no effect without a dataset")
        self._check_levels()
        self._check_counts()
        _ = self.arms

    @property
    def levels(self) -> tuple[float, ...]:
        """Clients or requests per second, in the order of measurement."""
        return self.concurrency if self.arrivals == "closed" else self.rates

    @property
    def arms(self) -> dict[str, SpeculativeConfig]:
        """The arms by name: plain, the fixed draft lengths, auto."""
        model = (self.draft_model or self.model) if needs_draft_model(self.method) else None
        arms = {PLAIN: SpeculativeConfig(policy="fixed")}
        for length in self.draft_lens:
            arms[f"k={length}"] = SpeculativeConfig(
                method=self.method, model=model, num_speculative_tokens=length, policy="fixed"
            )
        auto = {**self.speculative_config, "method": self.method, "model": model, "policy": "goodput"}
        if self.num_speculative_tokens is not None:
            auto["num_speculative_tokens"] = self.num_speculative_tokens
        arms[AUTO] = SpeculativeConfig.from_options(auto)
        return arms

    def requests_at(self, level: float, num_routes: int) -> int:
        """Requests that each arm completes in a round at a level."""
        if self.arrivals == "poisson":
            return self.num_requests or 16
        return max(int(level), self.num_requests or num_routes)

    def _check_levels(self) -> None:
        used, unused = ("concurrency", "rates") if self.arrivals == "closed" else ("rates", "concurrency")
        if not getattr(self, used):
            raise InvalidOptionError(f"arrivals={self.arrivals!r} needs {used}, as in {used}=1,4")
        if getattr(self, unused):
            raise InvalidOptionError(
                f"{unused}={getattr(self, unused)} has no effect with arrivals={self.arrivals!r}; leave it out"
            )
        for clients in self.concurrency:
            check_range("concurrency", clients, 1, "a client is needed")
        for rate in self.rates:
            if not 0.0 < rate < math.inf:
                raise InvalidOptionError(f"rates={rate} must be above 0 and finite; it is requests per second")

    def _check_counts(self) -> None:
        for length in self.draft_lens:
            check_range("draft_lens", length, 1, "plain decoding is always run")
        check_range("max_tokens", self.max_tokens, 4, "a time per token needs some tokens")
        check_range("repeats", self.repeats, 1, "at least one round is counted")
        check_range("seed", self.seed, 0, "use a non-negative integer")
        check_range("time_limit_s", self.time_limit_s, 0, "0 is no limit")
        for name in ("num_requests", "per_category", "num_speculative_tokens"):
            value = getattr(self, name)
            if value is not None:
                check_range(name, value, 1, "leave it out for the default")
        if not 0.0 <= self.temperature < math.inf:
            raise InvalidOptionError(f"temperature={self.temperature} must be 0 (greedy) or above")
