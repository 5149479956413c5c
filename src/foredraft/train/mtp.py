"""An MTP module in training (DeepSeek-V3, 2412.19437, section 2.2; for repeated use FastMTP, 2509.18362).

Its decoder layer is one of the target's kind, so that the module is written as the files of that kind have it and is
run by what runs the target.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from foredraft.errors import UnsupportedModelError
from foredraft.heads.kinds import PREFIXES
from foredraft.heads.mtp import MtpConfig, MtpHead, one_layer
from foredraft.heads.mtp_format import save_mtp
from foredraft.target.features import AFTER_NORM
from foredraft.train.options import TrainOptions
from foredraft.train.scaled import SOFTER
from foredraft.train.trainee import TrainTarget, TrainTexts
from foredraft.train.unrolled import SharedHeadTrainee, pass_state_through


def feature_layers(num_layers: int) -> tuple[int, ...]:
    return (AFTER_NORM,)


def check_target(target: TrainTarget) -> None:
    kind = target.model.config.get_text_config().model_type
    if kind not in PREFIXES:
        raise UnsupportedModelError(
            f"an MTP module has a decoder layer of the target's kind, and {target.name} is of the kind {kind!r}; known "
            f"are {', '.join(PREFIXES)}; train eagle3 or eagle for this target"
        )


def make(target: TrainTarget, texts: TrainTexts, options: TrainOptions) -> MtpTrainee:
    config = target.model.config.get_text_config()
    has_experts = any("mlp.experts." in name for name, _ in target.model.named_parameters())
    of_target = config.to_dict()
    del of_target["model_type"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        head = MtpHead(MtpConfig(layer=one_layer(config.model_type, of_target, has_experts)))
    trainee = MtpTrainee(head, target, texts, options)
    start_from_target(head, SOFTER * float(trainee.scales))
    return trainee


class MtpTrainee(SharedHeadTrainee):
    """An MTP module in training; the norm over the states that it reads takes their scale out."""

    def __init__(self, head: MtpHead, target: TrainTarget, texts: TrainTexts, options: TrainOptions):
        super().__init__(head, target, texts, options)
        self._num_layers = target.model.config.get_text_config().num_hidden_layers

    def save(self, path: Path) -> None:
        save_mtp(copy.deepcopy(self.head).cpu().to(self._dtype), path, self._num_layers)


@torch.no_grad()
def start_from_target(head: MtpHead, scale: float) -> None:
    """Let a module begin with the target's state as it is, at this scale; its layer adds nothing at first."""
    pass_state_through(head.eh_proj)
    for name, parameter in head.block.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.zero_()
    head.norm.weight += scale - 1.0  # whether the kind multiplies by the weight or by 1 + weight
