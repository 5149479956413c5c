"""From a model's name to a :class:`TargetModel` with its numerics settled."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys

import torch

from foredraft.config import EngineConfig
from foredraft.errors import InvalidOptionError
from foredraft.target.attention import ATTENTION_NAME, register_attention
from foredraft.target.forward import TargetModel
from foredraft.target.loader import LoadedModel, load_model
from foredraft.target.wrap import wrap_model
from foredraft.target.zoo import cache_folder

logger = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 2048


def load_target(name: str, config: EngineConfig) -> tuple[TargetModel, LoadedModel]:
    """Load a model for the engine; draft models are loaded the same way.

    Raises:
        ModelLoadError, UnsupportedModelError: see ``loader`` and ``wrap``.
        InvalidOptionError: ``max_model_len`` is beyond what the model was made for.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    register_attention()
    loaded = load_model(
        name,
        dtype=config.dtype,
        device=config.device,
        attn_implementation=ATTENTION_NAME,
        trust_remote_code=config.trust_remote_code,
        cache_dir=config.cache_dir,
    )
    limit = config.max_model_len or loaded.max_model_len
    if limit is None:
        limit = DEFAULT_MAX_MODEL_LEN
        logger.warning("%s states no length limit; %d tokens are taken, max_model_len gives another", name, limit)
    stated = loaded.max_model_len or limit
    if limit > stated and name == config.model:
        raise InvalidOptionError(f"max_model_len={limit} is above the {stated} positions that {name} was made for")
    model = wrap_model(
        loaded.model,
        min(limit, stated),
        packed=config.packed,
        compiled=config.compile,
        folder=cache_folder(config.cache_dir),
    )
    _release_file(loaded.model)
    return model, loaded


def _release_file(model: torch.nn.Module) -> None:
    """Copy the parameters that were not packed, so that the mapped weight file can be let go."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
