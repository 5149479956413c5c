"""The target drafts without some of its layers.

Draft & Verify (Zhang et al., 2309.08168), SWIFT (Xia et al., 2410.06916); here whole layers are left out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.layer_search import find_skip_layers
from foredraft.drafters.self_draft import SelfDrafter
from foredraft.errors import InvalidOptionError
from foredraft.target.forward import TargetModel
from foredraft.target.zoo import cache_folder


class LayerSkipDrafter(SelfDrafter):
    """The target without some of its layers drafts.

    Args:
        skip_layers: indices of the layers left out.

    Raises:
        InvalidOptionError: they are not some, but not all, of the target's.
    """

    def __init__(self, target: TargetModel, skip_layers: Collection[int]):
        layers = target.layers
        if not skip_layers or not set(skip_layers) < set(range(len(layers))):
            raise InvalidOptionError(
                f"skip_layers={list(skip_layers)} must be some, but not all, of the layers 0 to {len(layers) - 1} of "
                f"{type(target.model).__name__}"
            )
        kept = [layer for i, layer in enumerate(layers) if i not in skip_layers]
        super().__init__(target, target.with_layers(kept).forward, target.slots)
        self.cost = len(kept) / len(layers)


def build(
    speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any
) -> LayerSkipDrafter:
    if speculative.skip_layers is not None:
        return LayerSkipDrafter(target, speculative.skip_layers)
    num_draft_tokens = max(1, speculative.draft_limit("layer_skip"))
    found = find_skip_layers(target, num_draft_tokens, cache_folder(config.cache_dir) / "skip_layers")
    return LayerSkipDrafter(target, found)
