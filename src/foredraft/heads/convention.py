"""Whether an EAGLE-3 head reads the states that it was trained on.

A layer id that is off by one, or a norm on the wrong side, costs most of the acceptance and raises no error: 10 % of
first tokens instead of 45 % (vLLM, pull request 43671). So the head's guesses on a short text are compared with what
the target itself would say, once as the checkpoint is read and once for each neighbouring convention.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.eagle3 import Eagle3Head
from foredraft.target.features import HiddenStates
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


def check_conventions(head: Eagle3Head, target: TargetModel, tokenizer: Any, name: str) -> dict[str, float]:
    """Warn if the head would predict clearly better under a neighbouring convention.

    Returns:
        the share of right guesses by convention, the checkpoint's own under ``as read``; empty without a tokenizer,
        for what is no text tells nothing.
    """
    if tokenizer is None:
        return {}
    limit = target.max_model_len - 1
    tokens = tokenizer(TEXT)["input_ids"][: min(limit, 128)]
    scores = _scores(head, target, tokens)
    best = max(scores, key=scores.__getitem__)
    if scores[best] > scores["as read"] + CLEARLY:
        logger.warning(
            "%s predicts %.0f %% of the target's tokens as its config.json has it, and %.0f %% with %s; it was "
            "probably trained like that, so correct its config.json",
            name, 100 * scores["as read"], 100 * scores[best], best,
        )  # fmt: skip
    return scores


def _scores(head: Eagle3Head, target: TargetModel, tokens: list[int]) -> dict[str, float]:
    """The share of places at which the head's guess is the target's, by convention."""
    own, num_layers = head.config.feature_layers, len(target.layers)
    layers = {
        f"eagle_aux_hidden_state_layer_ids {[layer + shift for layer in own]}": [layer + shift for layer in own]
        for shift in (-1, 1)
    }
    possible = {name: ids for name, ids in layers.items() if min(ids) >= 0 and max(ids) <= num_layers}
    wanted = sorted({*own, *(layer for ids in possible.values() for layer in ids)})
    states, said = states_of(target, tokens, tuple(wanted))

    def score(variant: Eagle3Head, layer_ids: list[int] | tuple[int, ...]) -> float:
        features = torch.cat([states[:, wanted.index(layer)] for layer in layer_ids], -1)
        return _agreement(variant, features, tokens, said, target)

    scores = {"as read": score(head, own)}
    scores |= {name: score(head, ids) for name, ids in possible.items()}
    for flag in ("norm_before_residual", "norm_output"):
        value = not getattr(head.config, flag)
        scores[f"{flag} {value}"] = score(_with_flag(head, flag, value), own)
    return scores


def _with_flag(head: Eagle3Head, flag: str, value: bool) -> Eagle3Head:
    """The same weights under another flag."""
    config = replace(head.config, **{flag: value})  # type: ignore[arg-type]
    with torch.device("meta"):
        variant = Eagle3Head(config)
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
def _agreement(head: Eagle3Head, features: Tensor, tokens: list[int], said: Tensor, target: TargetModel) -> float:
    model: Any = target.model
    embeddings = model.get_input_embeddings().weight.float()
    text = torch.tensor([tokens], device=features.device)
    variant = copy.deepcopy(head).float().to(features.device)
    right: list[Tensor] = []
    for step, logits in enumerate(variant.unroll(features[None].clone(), text, embeddings.clone(), NUM_STEPS)):
        guesses = variant.token_ids[logits[0].argmax(-1)]
        answers = said[1 + step :]
        right.append(guesses[: len(answers)] == answers)
    return float(torch.cat(right).float().mean())
