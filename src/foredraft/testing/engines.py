"""Engines around tiny models, and running them to the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foredraft.config import SpeculativeConfig
from foredraft.drafters import Drafter
from foredraft.drafters.none import NoDrafter
from foredraft.engine import Engine
from foredraft.engine.sequence import Sequence as EngineSequence
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow
from foredraft.testing.drafters import parts_of
from foredraft.testing.models import target_for
from foredraft.types import Request, SamplingParams, StepOutput

SPARE_ID = -99
"""A sequence id that no engine gives out; nor does it those below."""


def engine_for(
    model: Any,
    drafter: Drafter | None = None,
    *,
    num_speculative_tokens: int = 4,
    acceptance_rule: str = "auto",
    allow_lossy: bool = False,
    max_model_len: int | None = None,
    **options: Any,
) -> Engine:
    """An engine over a tiny model.

    Args:
        model: a transformers model, which is copied, or a :class:`TargetModel`, which is used as it is.
        drafter: None is plain decoding.
        options: of :class:`Engine` (tokenizer, eos_token_ids, max_num_seqs, ...).
    """
    target = model if isinstance(model, TargetModel) else target_for(model, max_model_len=max_model_len)
    config = SpeculativeConfig(
        method="none" if drafter is None else "ngram",
        num_speculative_tokens=0 if drafter is None else num_speculative_tokens,
        acceptance_rule=acceptance_rule,
        allow_lossy=allow_lossy,
    )
    return Engine(target, drafter or NoDrafter(), config, **options)


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    after_step: Callable[[Engine, list[StepOutput]], None] | None = None,
) -> list[EngineSequence]:
    """Decode prompts in one batch; returns their sequences, finished, in the order of the prompts."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    sequences = [
        engine.add_request(Request(f"run-{index}", list(prompt), param))
        for index, (prompt, param) in enumerate(zip(prompts, each, strict=True))
    ]
    while engine.has_unfinished_requests:
        outputs = engine.step()
        if after_step is not None:
            after_step(engine, outputs)
    return sequences


def check_cache(model: TargetModel, sequence_id: int, token_ids: Sequence[int], tolerance: float = 1e-4) -> None:
    """Assert that a cache holds a prefix of a text: its length, and each key and value against a fresh prefill.

    At least one token of the text is not in the cache, for the next pass feeds it. ``tolerance`` is relative to the
    largest entry of a tensor, or absolute where that is below 1.
    """
    _check_texts(model, {sequence_id: token_ids}, tolerance)


def check_caches(engine: Engine) -> None:
    """:func:`check_cache` for every running sequence, in the target and in the models of the drafter."""
    parts = parts_of(engine.drafter)
    held = [value for part in parts if part.reads_target_tokens for value in vars(part).values()]
    texts = {sequence.sequence_id: sequence.token_ids for sequence in engine.scheduler.running}
    for model in (engine.target, *(model for model in held if isinstance(model, TargetModel))):
        _check_texts(model, {i: text for i, text in texts.items() if i in model.slots})


def _check_texts(model: TargetModel, texts: Mapping[int, Sequence[int]], tolerance: float = 1e-4) -> None:
    """All fresh prefills are one pass."""
    model.slots.check_integrity()
    prefixes = {}
    for sequence_id, token_ids in texts.items():
        length = model.slots.length(sequence_id)
        assert length <= len(token_ids) - 1, f"{length} tokens cached of a text of {len(token_ids)}"
        if length:
            prefixes[sequence_id] = list(token_ids[:length])
    if not prefixes:
        return
    spare = [SPARE_ID - place for place in range(len(prefixes))]
    for spare_id in spare:
        model.slots.open(spare_id)
    try:
        model.forward([PassRow(spare_id, prefix, 0) for spare_id, prefix in zip(spare, prefixes.values(), strict=True)])
        for spare_id, (sequence_id, prefix) in zip(spare, prefixes.items(), strict=True):
            model.slots.commit(spare_id, len(prefix))
            _compare(model, sequence_id, spare_id, tolerance)
    finally:
        for spare_id in reversed(spare):
            model.slots.close(spare_id)


def _compare(model: TargetModel, sequence_id: int, fresh_id: int, tolerance: float) -> None:
    pairs = zip(model.slots.read(sequence_id), model.slots.read(fresh_id), strict=True)
    for layer, (held, fresh) in enumerate(pairs):
        for part, (ours, theirs) in enumerate(zip(held, fresh, strict=True)):
            scale = max(1.0, float(theirs.abs().max()))
            assert torch.allclose(ours, theirs, atol=tolerance * scale, rtol=tolerance), (
                f"{('keys', 'values')[part] if len(held) == 2 else f'state {part}'} of layer {layer} are not "
                f"those of the text (sequence {sequence_id}, {model.slots.length(fresh_id)} tokens)"
            )
