"""What an audit is asked to do, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from foredraft.config import SpeculativeConfig
from foredraft.errors import InvalidOptionError
from foredraft.lab.audit.statistics import FALSE_ALARM_RATE
from foredraft.types import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOptions:
    """Settings of ``foredraft audit MODEL``.

    Attributes:
        model: folder, hub id or short name.
        speculative: the drafter and the acceptance rule under audit.
        temperatures: 0 audits greedy decoding, others sampling.
        params: filters and penalties of every text; its temperature is not used.
        num_tokens: judged at each temperature above 0, unless a bias is certain before.
        max_tokens: most new tokens of a text.
        batch_size: texts decoded together.
        prompts_file: a JSONL file as ``bench`` takes it, or a text file with a prompt a line; None takes the
            prompts that come with the package.
        false_alarm_rate: probability that an exact engine is convicted, over all temperatures, tests and looks.
        engine_options: of :class:`EngineConfig`.
    """

    model: str
    speculative: SpeculativeConfig
    temperatures: tuple[float, ...] = (0.0, 1.0)
    params: SamplingParams = field(default_factory=SamplingParams)
    num_tokens: int = 20_000
    max_tokens: int = 96
    batch_size: int = 16
    prompts_file: Path | None = None
    false_alarm_rate: float = FALSE_ALARM_RATE
    engine_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise InvalidOptionError("temperature is empty; give 0 for greedy decoding, 1, or both as 0,1")
        if any(not 0.0 <= each < float("inf") for each in self.temperatures):
            raise InvalidOptionError(f"temperature={self.temperatures} must be 0 (greedy) or above")
        for name in ("num_tokens", "max_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InvalidOptionError(f"{name}={getattr(self, name)} is below 1; use a positive number")
        if not 0.0 < self.false_alarm_rate < 1.0:
            raise InvalidOptionError(f"false_alarm_rate={self.false_alarm_rate} is outside (0, 1); 1e-6 is usual")
        if self.prompts_file is not None and not self.prompts_file.is_file():
            raise InvalidOptionError(f"prompts_file {self.prompts_file} does not exist")

    @property
    def num_sampling_audits(self) -> int:
        return sum(temperature > 0.0 for temperature in self.temperatures)

    def params_at(self, temperature: float) -> SamplingParams:
        """The sampling parameters of the texts at one temperature; a seed is of no use to greedy decoding."""
        chosen = {each.name: getattr(self.params, each.name) for each in fields(SamplingParams)}
        seed = self.params.seed if temperature > 0.0 else None
        return SamplingParams(**{**chosen, "temperature": temperature, "max_tokens": self.max_tokens, "seed": seed})
