"""The engine: requests in, tokens out."""

from foredraft.engine.engine import Engine
from foredraft.engine.llm import LLM

__all__ = ["LLM", "Engine"]
