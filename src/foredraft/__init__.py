"""Speculative decoding that cannot be seen in the output: the same tokens as plain decoding, only sooner."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.config import EngineConfig, SpeculativeConfig
    from foredraft.engine.engine import Engine
    from foredraft.engine.llm import LLM
    from foredraft.engine.transformers_entry import transformers_generate
    from foredraft.types import RequestOutput, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Engine",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "transformers_generate",
]

_HOMES = {
    "LLM": "engine.llm",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "RequestOutput": "types",
    "SamplingParams": "types",
    "SpeculativeConfig": "config",
    "transformers_generate": "engine.transformers_entry",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for: ``foredraft --help`` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
    return getattr(import_module(f"foredraft.{_HOMES[name]}"), name)
