"""What the roofline needs to know of a model, from its Hugging Face configuration alone (no weights)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft import theory
from foredraft.errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_STATEFUL_LAYERS = ("linear_attention", "mamba", "conv", "recurrent", "ssm")


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer's KV cache: bytes per token, and the window in tokens beyond which it does not grow."""

    bytes_per_token: float
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        num_params: all parameters, a tied embedding counted once.
        num_active_params: those that one token passes through; less in a mixture of experts.
        kv_layers: the layers that cache keys and values.
    """

    name: str
    num_params: float
    num_active_params: float
    kv_layers: tuple[KvLayer, ...] = ()

    def kv_bytes(self, context_len: int) -> float:
        """Bytes of KV cache that a pass reads for one sequence of ``context_len`` tokens."""
        return sum(
            layer.bytes_per_token * (context_len if layer.window is None else min(context_len, layer.window))
            for layer in self.kv_layers
        )

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that one more token of context adds before any window is full."""
        return sum(layer.bytes_per_token for layer in self.kv_layers)


def given_shape(
    num_params: float, num_layers: int, num_kv_heads: int, head_dim: int, *, kv_bytes_per_value: float = 2.0
) -> ModelShape:
    """A dense model of the given sizes with full attention in every layer."""
    layer = KvLayer(theory.kv_bytes_per_token(1, num_kv_heads, head_dim, kv_bytes_per_value))
    name = f"A model of {num_params / 1e9:g} billion parameters"
    return ModelShape(name, num_params, num_params, (layer,) * num_layers)


def model_shape(path: str | Path, *, kv_bytes_per_value: float = 2.0) -> ModelShape:
    """Read a local model folder or ``config.json``; the model is built on the meta device to be counted.

    Raises:
        ModelLoadError: there is no such configuration, or it cannot be read.
        UnsupportedModelError: it is not that of a causal language model.
    """
    config = _load_config(Path(path))
    import torch
    from transformers import AutoModelForCausalLM

    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnsupportedModelError(f"{path}: {config.model_type!r} is not a causal language model: {error}") from error
    text_config = config.get_text_config()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    num_params = sum(sizes.values())
    idle_params = sum(size for name, size in sizes.items() if ".experts." in name) * _idle_experts(text_config)
    return ModelShape(
        name=Path(path).name if Path(path).is_dir() else Path(path).resolve().parent.name,
        num_params=num_params,
        num_active_params=num_params - idle_params,
        kv_layers=kv_layers(text_config, kv_bytes_per_value=kv_bytes_per_value),
    )


def _load_config(path: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelLoadError(f"{path} has no config.json; give a model folder or the path of its config.json")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(file.parent if path.is_dir() else file))
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{file} cannot be read as a model configuration: {error}") from error
    return config


def _idle_experts(config: Any) -> float:
    """Part of the routed experts that a token does not pass through; 0 for a dense model."""
    num_experts = next(
        (
            getattr(config, name)
            for name in ("num_local_experts", "num_experts", "n_routed_experts")
            if hasattr(config, name)
        ),
        None,
    )
    num_chosen = getattr(config, "num_experts_per_tok", None)
    return 1.0 - num_chosen / num_experts if num_experts and num_chosen else 0.0


def kv_layers(config: Any, *, kv_bytes_per_value: float = 2.0) -> tuple[KvLayer, ...]:
    """Caching layers of a text configuration: full, sliding-window and latent (MLA) attention.

    Layers with a state instead of a cache do not grow with the context and are left out, as are layers that
    share another layer's cache.
    """
    num_layers = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    num_own = num_layers - int(getattr(config, "num_kv_shared_layers", 0) or 0)
    window = getattr(config, "sliding_window", None)
    bytes_per_token = _kv_bytes_per_layer_token(config, kv_bytes_per_value)
    return tuple(
        KvLayer(bytes_per_token, window if "sliding" in kind or "chunked" in kind else None)
        for kind in kinds[:num_own]
        if not any(word in kind for word in _STATEFUL_LAYERS)
    )


def _kv_bytes_per_layer_token(config: Any, bytes_per_value: float) -> float:
    latent_size = getattr(config, "kv_lora_rank", None)
    if latent_size:
        return float(latent_size + config.qk_rope_head_dim) * bytes_per_value
    num_heads = int(config.num_attention_heads)
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
    return theory.kv_bytes_per_token(1, num_kv_heads, head_dim, bytes_per_value)
