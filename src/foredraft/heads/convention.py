"""Whether a head reads the states that it was trained on.

A layer id that is off by one, or a norm on the wrong side, costs most of the acceptance and raises no error: 10 % of
first tokens instead of 45 % (vLLM, pull request 43671). So a head's guesses on a short text are compared with what
the target itself would say, once as the checkpoint is read and once for each neighbouring convention.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.eagle import EagleHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.mlp import MlpSpeculator
from foredraft.heads.mtp import MtpHead
from foredraft.target.features import AFTER_NORM, HiddenStates
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow

logger = logging.getLogger(__name__)

TEXT = (
    "The printing press changed how people shared ideas. Before it, every book was copied by hand, which took months "
    "and cost a great deal. Afterwards a town could print a thousand copies in a week, and news travelled faster than "
    "any messenger. Some were afraid of this; most were glad of it, and within fifty years there were presses in two "
    "hundred cities of Europe."
)
NUM_STEPS = 2
CLEARLY = 0.15
"""By so much of the places more another convention must be right; of 70 places and 2 steps that is 4 deviations."""
PROBE_ID = -5
AnyHead = Eagle3Head | EagleHead | MtpHead | MlpSpeculator


def check_conventions(head: AnyHead, target: TargetModel, tokenizer: Any, name: str) -> dict[str, float]:
    """Warn if the head would predict clearly better under a neighbouring convention.

    Returns:
        the share of right guesses by convention, the checkpoint's own under ``as read``; empty without a tokenizer,
        for what is no text tells nothing, or if the target does not give the states.
    """
    if tokenizer is None or not target.gives_states(head.config.feature_layers):
        return {}
    limit = target.max_model_len - 1
    tokens = tokenizer(TEXT)["input_ids"][: min(limit, 128)]
    scores = _scores(head, target, tokens)
    warn_of_better(name, scores)
    return scores


def warn_of_better(name: str, scores: dict[str, float]) -> None:
    """Say if a head predicts clearly better under another convention than as it was read."""
    best = max(scores, key=scores.__getitem__)
    if scores[best] > scores["as read"] + CLEARLY:
        logger.warning(
            "%s predicts %.0f %% of the target's tokens as its config.json has it, and %.0f %% with %s; it was "
            "probably trained like that, so correct its config.json",
            name, 100 * scores["as read"], 100 * scores[best], best,
        )  # fmt: skip


def neighbours(head: AnyHead, num_layers: int) -> Iterator[tuple[str, AnyHead]]:
    """The head under other conventions, each with what would be written in its config.json."""
    layers, flags = head.config.feature_layers, list[str]()
    if isinstance(head, Eagle3Head):
        flags = ["norm_before_residual", "norm_output"]
        for shifted in ([layer + shift for layer in layers] for shift in (-1, 1)):
            if min(shifted) >= 0 and max(shifted) <= num_layers:
                yield f"eagle_aux_hidden_state_layer_ids {shifted}", _changed(head, feature_layers=tuple(shifted))
    else:
        is_before = layers != (AFTER_NORM,)
        other = (AFTER_NORM,) if is_before else (num_layers,)
        yield f"state_before_norm {not is_before}", _changed(head, feature_layers=other)
    if isinstance(head, MtpHead):
        first = not head.config.states_first
        yield f"mtp_hidden_states_first {first}", _changed(head, states_first=first)
    if isinstance(head, MtpHead) or (isinstance(head, EagleHead) and head.config.layernorms):
        flags = ["norm_output"]
    for flag in flags:
        value = not getattr(head.config, flag)
        yield f"{flag} {value}", _changed(head, **{flag: value})


def _scores(head: AnyHead, target: TargetModel, tokens: list[int]) -> dict[str, float]:
    """The share of places at which the head's guess is the target's, by convention."""
    others = neighbours(head, target.num_layers)
    variants = {"as read": head, **{n: v for n, v in others if target.gives_states(v.config.feature_layers)}}
    wanted = sorted({layer for variant in variants.values() for layer in variant.config.feature_layers})
    states, said = states_of(target, tokens, tuple(wanted))

    def score(variant: AnyHead) -> float:
        features = torch.cat([states[:, wanted.index(layer)] for layer in variant.config.feature_layers], -1)
        return _agreement(variant, features, tokens, said, target)

    return {name: score(variant) for name, variant in variants.items()}


def _changed(head: AnyHead, **changes: Any) -> AnyHead:
    """The same weights under other options."""
    config: Any = replace(head.config, **changes)
    with torch.device("meta"):
        variant = type(head)(config)
    variant.load_state_dict(head.state_dict(), assign=True)
    return variant


def states_of(target: TargetModel, tokens: list[int], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """States ``[S, layers, hidden]`` of a text, and the token that the target puts behind each place ``[S]``."""
    target.tap(layers)
    wanted = HiddenStates(layers)
    target.slots.open(PROBE_ID)
    try:
        logits = target.forward([PassRow(PROBE_ID, tokens, len(tokens))], wanted)
    finally:
        target.slots.close(PROBE_ID)
    return wanted.of_sequence[PROBE_ID].float(), logits.argmax(-1)


@torch.no_grad()
def _agreement(head: AnyHead, features: Tensor, tokens: list[int], said: Tensor, target: TargetModel) -> float:
    model: Any = target.model
    embeddings = model.get_input_embeddings().weight.float()
    text = torch.tensor([tokens], device=features.device)
    variant = copy.deepcopy(head).float().to(features.device)
    inputs = features[None].clone(), text, embeddings.clone(), NUM_STEPS
    if isinstance(variant, Eagle3Head | MlpSpeculator):
        unrolled = variant.unroll(*inputs)
    else:
        lm_head = model.get_output_embeddings()
        unrolled = variant.unroll(*inputs, lambda states: lm_head(states.to(target.dtype)))
    right: list[Tensor] = []
    for step, logits in enumerate(unrolled):
        best = logits[0].argmax(-1)
        guesses = variant.token_ids[best] if isinstance(variant, Eagle3Head) else best
        answers = said[1 + step :]
        right.append(guesses[: len(answers)] == answers)
    return float(torch.cat(right).float().mean())
