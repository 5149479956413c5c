"""Multi-token prediction (DeepSeek-V3, 2412.19437, section 2.2; Qwen3-Next, MiMo, GLM): a layer of the target's kind.

Drafting. A row pairs the target's state h_i at place i with the next token c_{i+1} and predicts c_{i+2}::

    x = eh_proj(cat(enorm(embedding), hnorm(h)))      states first in MiMo (``states_first``)
    h = one decoder layer of the target's kind (x)    latent attention and experts included
    logits = target's lm_head(norm(h))
    next h = norm(h)                                  h itself with ``norm_output`` False

h_i is what the target's lm_head reads. transformers and vLLM feed states so; vLLM also takes the first token of a text
for zeros, which is left out here as it is in transformers. One module is run again and again for further tokens; that
is how published ones, which were trained for one step, are used, and what FastMTP (2509.18362) trains for.

Training: ``unroll_states`` of ``recurrent``, cross-entropy with weights 0.6^step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from foredraft.heads.kinds import ModelLayer, layer_classes
from foredraft.heads.layers import Attend
from foredraft.heads.recurrent import StateHead
from foredraft.target.features import AFTER_NORM


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """Shapes and variants of a head.

    Attributes:
        layer: configuration of its decoder layer, of transformers: see :func:`one_layer`.
        feature_layers: the one whose state it reads.
        states_first: ``eh_proj`` reads the state before the embedding.
        norm_output: the state that is fed back is the one behind ``norm``.
    """

    layer: Any
    feature_layers: tuple[int, ...] = (AFTER_NORM,)
    states_first: bool = False
    norm_output: bool = True


class MtpHead(StateHead):
    """The module; names of its tensors are DeepSeek's but for ``norm`` and the ``block``."""

    config: MtpConfig

    def __init__(self, config: MtpConfig):
        super().__init__()
        self.config = config
        layer = config.layer
        norm = layer_classes(layer.model_type).norm
        self.enorm, self.hnorm, self.norm = (norm(layer.hidden_size, eps=layer.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * layer.hidden_size, layer.hidden_size, bias=False)
        self.block = ModelLayer(layer)

    def step(self, embeddings: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        token, state = self.enorm(embeddings), self.hnorm(hidden)
        both = [state, token] if self.config.states_first else [token, state]
        hidden = attend(self.block, self.eh_proj(torch.cat(both, -1)))
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), normed


def one_layer(kind: str, options: Mapping[str, Any], has_experts: bool = False) -> Any:
    """The configuration of one layer of full attention of a kind.

    Args:
        kind: ``model_type`` of transformers.
        options: of a whole model of that kind.
        has_experts: its MLP is a mixture of experts, where the kind has both.
    """
    made = CONFIG_MAPPING[kind]
    changes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if has_experts else "dense"],
        "first_k_dense_replace": 0 if has_experts else 1,
        "mlp_only_layers": [] if has_experts else [0],
    }
    known = {field.name for field in fields(made)}
    return made(**{**options, **{name: value for name, value in changes.items() if name in known}})
