"""From a model folder to a model that is ready to run, with errors that name the file and the remedy."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foredraft.errors import ModelLoadError, UnsupportedModelError
from foredraft.target.checkpoint import check_weight_files, fingerprint, mtp_module, read_config
from foredraft.target.convert import quiet_transformers
from foredraft.target.zoo import resolve_model

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tekken.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A target or draft model as read from disk, in evaluation mode and without gradients.

    Attributes:
        name: what the user wrote.
        path: the folder it was read from.
        eos_token_ids: the tokens that end a text, from generation_config.json and config.json, ascending.
        max_model_len: positions that the model was made for; None if its configuration states none.
        fingerprint: 16 hex digits that change with the configuration or the weights, but not when the
            folder is moved or copied; a key for what was measured of the model.
        load_s: seconds that reading took, without any download.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    path: Path
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]
    max_model_len: int | None
    fingerprint: str
    load_s: float


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    device: str = "auto",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> LoadedModel:
    """Load a causal language model from a folder, a hub id or a short name (see ``zoo.resolve_model``).

    ``dtype="auto"`` keeps the checkpoint's own; ``device="auto"`` is the first CUDA device, or else the CPU.

    Raises:
        ModelLoadError: the model cannot be found or read; or dtype, device or attention are not to be had.
        UnsupportedModelError: its weights are quantised.
    """
    wanted_dtype, wanted_device = _parse_dtype(dtype), _parse_device(device)
    path = resolve_model(name_or_path, cache_dir)
    started = time.perf_counter()
    config = _load_config(path, trust_remote_code)
    _check_is_causal_lm(path, config)
    weights = check_weight_files(path)
    model = _load_weights(path, config, wanted_dtype, attn_implementation, trust_remote_code)
    model = model.to(wanted_device).eval().requires_grad_(False)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=os.fspath(name_or_path),
        path=path,
        dtype=model.dtype,
        device=wanted_device,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        max_model_len=_max_model_len(config),
        fingerprint=fingerprint(path, weights),
        load_s=time.perf_counter() - started,
    )
    logger.info("loaded %s (%s, %s) in %.2f s", loaded.name, loaded.dtype, loaded.device, loaded.load_s)
    return loaded


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model folder; None if the folder has none.

    Raises:
        ModelLoadError: there are tokenizer files, but they cannot be read.
    """
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelLoadError(f"the tokenizer in {path} cannot be read: {error}") from error
    return tokenizer


def _parse_dtype(dtype: str) -> torch.dtype | str:
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelLoadError(f"dtype={dtype!r} is not known; use 'auto' or one of {', '.join(DTYPES)}")
    return DTYPES.get(dtype, "auto")


def _parse_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        wanted = torch.device(device)
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError) as error:  # which of them, differs by device
        first_line = str(error).splitlines()[0]
        raise ModelLoadError(
            f"device={device!r} is not available ({first_line}); use 'auto', 'cpu'"
            + "".join(f", 'cuda:{index}'" for index in range(torch.cuda.device_count()))
        ) from error
    return wanted


def _load_config(path: Path, trust_remote_code: bool) -> Any:
    raw = read_config(path)
    if "quantization_config" in raw:
        method = raw["quantization_config"].get("quant_method", "an unnamed method")
        raise UnsupportedModelError(
            f"the weights in {path} are quantised ({method}), which is not run here; "
            "use the model's bfloat16, float16 or float32 weights"
        )
    if "auto_map" in raw and not trust_remote_code and raw.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelLoadError(
            f"{path} brings Python code of its own ({', '.join(sorted(raw['auto_map']))}); "
            "read it, then pass trust_remote_code=True to have it run"
        )
    try:
        with quiet_transformers():
            return transformers.AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=trust_remote_code
            )
    except Exception as error:  # validation of a configuration raises many kinds
        raise ModelLoadError(
            f"{path / 'config.json'} is not understood by transformers {transformers.__version__}, "
            f"model_type {raw.get('model_type')!r}: {error}"
        ) from error


def _check_is_causal_lm(path: Path, config: Any) -> None:
    architectures = config.architectures or []
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    classes = (known,) if isinstance(known, str) else tuple(known or ())
    if not classes or config.is_encoder_decoder or (architectures and not set(architectures) & set(classes)):
        kind = ", ".join(architectures) or config.model_type
        expected = f"; for {config.model_type} that would be {', '.join(classes)}" if classes else ""
        raise ModelLoadError(f"{path} holds {kind}, which is not a causal language model (decoder only){expected}")


def _load_weights(
    path: Path, config: Any, dtype: torch.dtype | str, attn_implementation: str, trust_remote_code: bool
) -> PreTrainedModel:
    try:
        with quiet_transformers():
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are reported below, by name
                output_loading_info=True,
            )
    except Exception as error:  # model code of any origin; the reason is in its message
        raise ModelLoadError(f"the model in {path} cannot be loaded: {error}") from error
    text = config.get_text_config()
    has_mtp = getattr(text, "num_mtp_layers", None) or getattr(text, "num_nextn_predict_layers", None)
    unexpected = [
        key for key in info["unexpected_keys"] if not (has_mtp and mtp_module(key, text.to_dict()))
    ]  # modules for multi-token prediction are read by their drafter
    faults = {
        "lack": info["missing_keys"],
        "have more than the model uses:": unexpected,
        "have other shapes than config.json says for": [key for key, *_ in info["mismatched_keys"]],
    }
    for fault, names in faults.items():
        if names:
            shown = ", ".join(sorted(names)[:5])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ModelLoadError(f"the weights in {path} {fault} {shown}{more}; they do not belong to this config.json")
    if model.dtype not in DTYPES.values():
        raise ModelLoadError(f"{path} has weights in {model.dtype}; ask for one of {', '.join(DTYPES)} with dtype=")
    return model


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    if not found and tokenizer is not None and tokenizer.eos_token_id is not None:
        found = {tokenizer.eos_token_id}
    return tuple(sorted(found))


def _max_model_len(config: Any) -> int | None:
    text_config = config.get_text_config()
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):
        value = getattr(text_config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
