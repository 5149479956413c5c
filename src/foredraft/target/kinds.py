"""Which kinds of models are run, and how: what the tests prove, and what is refused, with the reason.

A kind is transformers' ``model_type``. Kinds that are not listed are not refused for that: each model is checked
when it is loaded, and what does not give the logits of the original is refused then.
"""

from __future__ import annotations

from typing import Any

from foredraft.errors import UnsupportedModelError

ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "attention"})
STATELESS_KINDS = frozenset({"moe", "mlp"})
STATE_KINDS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "recurrent state"})
"""What a short text puts to the test. Layers of other kinds (which choose among keys, or cut the text in chunks) are
run in the models named below only."""
STATEFUL_HINTS = ("mamba", "linear_attention", "recurrent", "conv")

ATTENTION = (
    "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_bigcode",
    "gpt_neox", "gpt_oss", "gptj", "granite", "helium", "hunyuan_v1_dense", "llama", "ministral", "mistral",
    "mixtral", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "starcoder2",
)  # fmt: skip
"""Keys and values in every layer: a rejected draft is cut off by length."""

REPLAYED = (
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lara_mini", "lfm2", "lfm2_moe",
    "llama4_text", "mamba2", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text",
    "rwkv", "xlstm", "zaya",
)  # fmt: skip
"""A state that cannot be cut: after a rejection it is restored from a copy and the accepted tokens are fed again."""

STEPPED = ("falcon_mamba", "jamba", "mamba", "minimax", "zamba")
"""As above, but a state is continued rightly by one token a call only: exact, and no faster than plain decoding.

MiniMax in float32 only: its tables of decay, rounded to bf16, contradict each other, and it is refused then.
"""

_OWN_ATTENTION = "its attention is code of its own, which cannot be made to read foredraft's keys and values"
_TWO_FORMULAS = (
    "token by token it leaves out the lower limit of the time step (time_step_min) that it has in longer passes, so "
    "the logits differ; runs where the limit is without effect"
)
_NOT_TEXT_ONLY = "there is no causal language model of this kind, only one with images or sound"
REFUSED = {
    "bert": "it looks ahead",
    "bloom": _OWN_ATTENTION,
    "deepseek_v4": "fed token by token, its logits differ at some places from those of one pass",
    "diffllama": "it calls the attention of a layer twice",
    "doge": _OWN_ATTENTION,
    "glm5_next": _NOT_TEXT_ONLY,
    "minicpm_ocr": _NOT_TEXT_ONLY,
    "minicpmv4_6": _NOT_TEXT_ONLY,
    "minicpmv4_7": _NOT_TEXT_ONLY,
    "mpt": _OWN_ATTENTION,
    "nemotron": _OWN_ATTENTION,
    "nemotron3_5_transcribe": _NOT_TEXT_ONLY,
    "nemotron_h": _TWO_FORMULAS,
    "nemotron_h_omni": _NOT_TEXT_ONLY,
    "recurrent_gemma": "it keeps its state in its own modules, where it cannot be copied, and for one text at a time",
    "stablelm": _OWN_ATTENTION,
    "xglm": _OWN_ATTENTION,
    "zamba2": _TWO_FORMULAS,
}


def describe(model: Any) -> str:
    """Class and kind of a model and the kinds of its layers' state, for messages."""
    text = model.config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or []) - STATELESS_KINDS)
    layers = f", layers of {' and '.join(kinds)}" if kinds else ""
    return f"{type(model).__name__} ({text.model_type}{layers})"


def known_reason(model: Any) -> str:
    """Why models of this kind are refused, to be added to a message; empty if that is not known."""
    reason = REFUSED.get(model.config.get_text_config().model_type)
    return f" ({reason})" if reason else ""


def state_kinds(model: Any) -> list[str]:
    """The kinds of layers that keep another state than keys and values; empty for models of attention only.

    Raises:
        UnsupportedModelError: it is an encoder-decoder model, or has layers of a kind that is not proved.
    """
    text = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{describe(model)} is an encoder-decoder model; only decoder-only models are supported"
        )
    kinds = set(getattr(text, "layer_types", None) or []) - ATTENTION_KINDS - STATELESS_KINDS
    stateful = getattr(model, "_is_stateful", False) or any(hint in text.model_type for hint in STATEFUL_HINTS)
    found = sorted(kinds) or ["recurrent state"] * bool(stateful)
    unknown = [kind for kind in found if kind not in STATE_KINDS]
    if unknown and text.model_type not in REPLAYED:
        raise UnsupportedModelError(
            f"{describe(model)} is not run: layers of {' and '.join(unknown)} are not proved in this kind of "
            f"model{known_reason(model)}; use a model of another kind (foredraft env --models)"
        )
    return found
