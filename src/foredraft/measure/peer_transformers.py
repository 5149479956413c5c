"""transformers as the peer: plain, prompt lookup and assisted generation on the same weights.

The peer runs its own, unchanged copy of the model with its default attention, in this process and with the
same threads. The time of the first token comes from a streamer, which ``generate`` calls whenever it has new
tokens; passes are counted by a forward hook on the target only, so a draft model's passes are not mixed in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from foredraft.config import EngineConfig
from foredraft.measure.arms import PassCounter, Run, TimeSplit
from foredraft.target.convert import quiet_transformers
from foredraft.target.loader import load_model

PEER_METHODS = {"none": 0, "ngram": 10, "draft_model": 5}
"""The methods that transformers has too, with the draft tokens that they are run with by default."""


class _Clock(BaseStreamer):  # type: ignore[misc]  # transformers is not typed
    """Notes when new tokens arrive, and how many; the first call hands over the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self._has_prompt = False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            self.times.append(time.perf_counter())
            self.counts.append(value.numel())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is held back."""


class PeerModel:
    """The peer's copy of the target, and of the draft model if one is asked for. Loads them.

    Args:
        config: model, dtype, device and folders, as for our own engine.
        draft_model: name of the draft model, or None.
    """

    def __init__(self, config: EngineConfig, draft_model: str | None):
        self.model, self.counter = self._load(config.model, config)
        self.draft: Any = None
        self.draft_counter = PassCounter()
        if draft_model is not None:
            self.draft, self.draft_counter = self._load(draft_model, config)

    @staticmethod
    def _load(name: str, config: EngineConfig) -> tuple[Any, PassCounter]:
        model = load_model(
            name,
            dtype=config.dtype,
            device=config.device,
            trust_remote_code=config.trust_remote_code,
            cache_dir=config.cache_dir,
        ).model
        # Nothing but what each run states: no end token, and no sampling defaults of the checkpoint.
        model.generation_config = GenerationConfig(pad_token_id=0)
        return model, PassCounter().attach(model)


class TransformersArm:
    """``generate`` with one method.

    Args:
        peer: the loaded models.
        num_speculative_tokens: None takes 10 for prompt lookup and 5 for assisted generation, without the
            confidence threshold, so that a draft has that length.
    """

    engine = "transformers"

    def __init__(self, peer: PeerModel, method: str, num_speculative_tokens: int | None):
        self.method, self._peer = method, peer
        self.num_speculative_tokens = PEER_METHODS[method] if num_speculative_tokens is None else num_speculative_tokens
        self._options: dict[str, Any] = {}
        if method == "ngram":
            self._options["prompt_lookup_num_tokens"] = self.num_speculative_tokens
        elif method == "draft_model":
            self._options["assistant_model"] = peer.draft
            settings = peer.draft.generation_config
            settings.num_assistant_tokens = self.num_speculative_tokens
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0

    def run(self, prompt: Sequence[int], *, temperature: float, seed: int, max_tokens: int) -> Run:
        peer, clock = self._peer, _Clock()
        inputs = torch.tensor([list(prompt)], device=peer.model.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
        peer.counter.reset()
        peer.draft_counter.reset()
        with quiet_transformers(), torch.inference_mode():
            began = time.perf_counter()
            output = peer.model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=max_tokens,
                streamer=clock,
                **sampling,
                **self._options,
            )
            tokens = output[0, len(prompt) :].tolist()
            total_s = time.perf_counter() - began
        return Run(
            tokens,
            self._drafted(len(prompt)),
            clock.counts,
            peer.counter.num_passes,
            clock.times[0] - began,
            total_s,
            self._split(total_s),
        )

    def _drafted(self, num_prompt_tokens: int) -> list[int]:
        """Draft tokens of each pass: those it was fed beyond the prompt or beyond the last token."""
        known = [num_prompt_tokens] + [1] * (len(self._peer.counter.widths) - 1)
        return [width - fed for width, fed in zip(self._peer.counter.widths, known, strict=True)]

    def _split(self, total_s: float) -> TimeSplit:
        target_s, draft_s = self._peer.counter.seconds, self._peer.draft_counter.seconds
        return TimeSplit(draft_s, target_s, 0.0, max(0.0, total_s - target_s - draft_s))
