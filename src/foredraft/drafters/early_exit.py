"""The target's first layers draft, and its pass goes on where they stopped (LayerSkip, Elhoushi et al., 2404.16710).

A model that was not trained for it agrees little with its own first layers. What the kept states save is arithmetic:
the last token of a draft still goes through all layers, so the weights are read as often.
"""

from __future__ import annotations

from typing import Any

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.self_draft import SelfDrafter
from foredraft.target.early_exit import EarlyExit
from foredraft.target.forward import TargetModel


class EarlyExitDrafter(SelfDrafter):
    """The target's first layers draft; its pass goes on where they stopped.

    Args:
        exit_layer: how many layers draft; the last norm and the head follow them.
    """

    def __init__(self, target: TargetModel, exit_layer: int):
        target.early_exit = EarlyExit(target, exit_layer)
        super().__init__(target, target.early_exit.draft, target.slots)
        self.cost = exit_layer / len(target.layers)


def build(
    speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any
) -> EarlyExitDrafter:
    return EarlyExitDrafter(target, speculative.exit_layer or max(1, len(target.layers) // 3))
