"""For people who stay in transformers: ``model.generate(..., custom_generate=foredraft.transformers_generate)``.

transformers turns a generation config into logits processors and stopping criteria. Those that foredraft can
honour are read off them; any other, whether from the config or from the caller, is refused by name.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters import make_drafter
from foredraft.engine.engine import Engine
from foredraft.engine.profile import make_policy
from foredraft.errors import InvalidOptionError, RequestError
from foredraft.target.forward import TargetModel
from foredraft.target.selfcheck import Numerics, settle_numerics
from foredraft.target.wrap import wrap_model
from foredraft.types import Request, SamplingParams

_HONOURED: dict[type, Callable[[Any, int], dict[str, Any]]] = {
    processors.TemperatureLogitsWarper: lambda p, _: {"temperature": float(p.temperature)},
    processors.TopKLogitsWarper: lambda p, _: {"top_k": int(p.top_k)},
    processors.TopPLogitsWarper: lambda p, _: {"top_p": float(p.top_p)},
    processors.MinPLogitsWarper: lambda p, _: {"min_p": float(p.min_p)},
    processors.RepetitionPenaltyLogitsProcessor: lambda p, _: {"repetition_penalty": float(p.penalty)},
    processors.MinLengthLogitsProcessor: lambda p, width: {"min_tokens": max(0, int(p.min_length) - width)},
    processors.MinNewTokensLengthLogitsProcessor: lambda p, _: {"min_tokens": int(p.min_new_tokens)},
    processors.SuppressTokensLogitsProcessor: lambda p, _: {"banned_token_ids": tuple(map(int, p.suppress_tokens))},
}
_HONOURED_STOPS = (criteria.MaxLengthCriteria, criteria.EosTokenCriteria)


class TransformersGenerate:
    """The callable behind ``foredraft.transformers_generate``.

    It keeps one packed copy of each model's structure for as long as the model lives (the weights that are not
    packed are shared), and makes a new one when the model's weights change. The caller's model, config and
    arguments are not changed.
    """

    def __init__(self) -> None:
        self._targets: weakref.WeakKeyDictionary[nn.Module, tuple[int, TargetModel, Numerics, str]]
        self._targets = weakref.WeakKeyDictionary()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode a batch of left-padded prompts; called by transformers.

        Args:
            input_ids: ``[B, T]``, with ``attention_mask`` 0 on padding.
            speculative_config: as for :class:`foredraft.LLM`; n-gram drafts by default.
            seed: with it, sampled rows are those of plain decoding; row i uses ``seed + i``.

        Returns:
            ``[B, T + new]`` ids, padded on the right, or transformers' output object if the config asks for it.

        Raises:
            InvalidOptionError: an option that foredraft does not honour; it is named.
        """
        width = input_ids.shape[1]
        params = _sampling_params(logits_processor, stopping_criteria, generation_config, width)
        _refuse_inputs(model_kwargs, generation_config)
        config = SpeculativeConfig.from_options(
            {"method": "ngram"} if speculative_config is None else speculative_config
        )
        target, numerics, fingerprint = self._target(model)
        engine_config = EngineConfig(model=model.config._name_or_path or type(model).__name__)
        eos = generation_config._eos_token_tensor
        drafter = make_drafter(config, engine_config, target, None)
        engine = Engine(
            target,
            drafter,
            config,
            contract=numerics.for_drafts(drafter.makes_trees),
            policy=make_policy(config, drafter, target, fingerprint, engine_config),
            eos_token_ids=() if eos is None else tuple(eos.reshape(-1).tolist()),
        )
        prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
        sequences = [
            engine.add_request(
                Request(str(i), prompt, SamplingParams(**params, seed=None if seed is None else seed + i))
            )
            for i, prompt in enumerate(prompts)
        ]
        try:
            while engine.has_unfinished_requests:
                engine.step()
        finally:
            for i in range(len(sequences)):
                engine.abort(str(i))
        out = _joined(input_ids, [s.output_token_ids for s in sequences], generation_config)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=out)
        return out

    def _target(self, model: nn.Module) -> tuple[TargetModel, Numerics, str]:
        weights = hash(tuple((p.data_ptr(), p._version) for p in model.parameters()))
        known = self._targets.get(model)
        if known is None or known[0] != weights:
            shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
            config: Any = copy.deepcopy(model.config)
            clone = copy.deepcopy(model, {**shared, id(model.config): config})
            length = getattr(config.get_text_config(), "max_position_embeddings", None) or 2048
            target = wrap_model(clone, length)
            fingerprint = _fingerprint(model)
            numerics = settle_numerics(target, fingerprint, EngineConfig(model=type(model).__name__))
            known = self._targets[model] = (weights, target, numerics, fingerprint)
        return known[1:]


transformers_generate = TransformersGenerate()


def _sampling_params(logits_processor: Any, stopping_criteria: Any, config: Any, width: int) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0}
    for processor in logits_processor:
        read = _HONOURED.get(type(processor))
        if read is None:
            raise InvalidOptionError(
                f"foredraft does not honour {type(processor).__name__}; leave out the option that "
                "asks for it, or generate without custom_generate"
            )
        params |= read(processor, width)
    for criterion in stopping_criteria:
        if not isinstance(criterion, _HONOURED_STOPS):
            raise InvalidOptionError(
                f"foredraft does not honour {type(criterion).__name__}; leave it out, or "
                "generate without custom_generate"
            )
    params["max_tokens"] = config.max_length - width
    return params


def _refuse_inputs(model_kwargs: dict[str, Any], config: Any) -> None:
    if config.num_beams > 1:
        raise InvalidOptionError(f"num_beams={config.num_beams}: foredraft has no beam search; use num_beams=1")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise InvalidOptionError(f"{name}=True is not honoured by foredraft; leave it out")
    if _is_filled(model_kwargs.get("cache")):
        raise InvalidOptionError(
            "foredraft keeps its own cache and cannot continue from a filled one; pass the full prompt"
        )
    for name in ("inputs_embeds", "state"):
        if model_kwargs.get(name) is not None:
            raise InvalidOptionError(f"{name} is not honoured by foredraft; pass input_ids")


def _is_filled(cache: Any) -> bool:
    if cache is None:
        return False
    if cache.is_linear and all(cache.is_linear):  # recurrent layers count no tokens
        return bool(cache.has_previous_state())
    return bool(cache.get_seq_length() > 0)


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    if attention_mask is None:
        return [list(row) for row in input_ids.tolist()]
    prompts = [row[keep.bool()].tolist() for row, keep in zip(input_ids, attention_mask, strict=True)]
    if any(not prompt for prompt in prompts):
        raise RequestError("a prompt is empty: its attention_mask is 0 everywhere")
    return prompts


def _joined(input_ids: Tensor, outputs: list[list[int]], config: Any) -> Tensor:
    pad = config._pad_token_tensor
    width = max(map(len, outputs))
    fill = 0 if pad is None else int(pad)
    rows = [F.pad(torch.tensor(out), (0, width - len(out)), value=fill) for out in outputs]
    return torch.cat([input_ids, torch.stack(rows).to(input_ids)], 1)


def _fingerprint(model: Any) -> str:
    about = hashlib.sha256(model.config.to_json_string().encode())
    for name, parameter in model.named_parameters():
        about.update(name.encode())
        about.update(parameter.detach().reshape(-1)[:16].float().cpu().numpy().tobytes())
    return about.hexdigest()[:16]
