"""From a configuration to its drafter. The methods are listed in :mod:`foredraft.methods`."""

from __future__ import annotations

import importlib
from typing import Any

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.base import Drafter
from foredraft.drafters.combined import CombinedDrafter
from foredraft.methods import METHODS
from foredraft.target.forward import TargetModel


def make_drafter(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    """Build the drafter of a configuration, or the combination of several.

    Raises:
        IncompatibleDrafterError: it does not fit the target.
    """
    sources: list[Drafter] = []
    for method in speculative.methods:
        module = importlib.import_module(METHODS[method].module)
        source = module.build(speculative, config, target, tokenizer)
        if speculative.policy == "confidence":
            source.stop_below = speculative.assistant_confidence_threshold
        sources.append(source)
    if len(sources) == 1:
        return sources[0]
    limits = [speculative.draft_limit(method) for method in speculative.methods]
    return CombinedDrafter(sources, limits, speculative.methods)
