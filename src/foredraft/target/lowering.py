"""Replace a model's modules by packed ones, each checked against the module that it replaces.

The model runs once on a few tokens while hooks record what every module gets and gives. A replacement is
taken only if it gives the same for the same input, so a model of an unknown kind merely stays slower.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.pytorch_utils import Conv1D

from foredraft.errors import UnsupportedModelError
from foredraft.target.attention import ATTENTION_NAME, attention_forward, register_attention
from foredraft.target.layers import Arena, LayerStack, PackedLayer, describe_layer
from foredraft.target.layout import PassLayout, PassRow, PassShape, build_layout
from foredraft.target.packed import PackedAttention, PackedGatedMLP, PackedLinear, PackedRMSNorm
from foredraft.target.slots import KVSlots
from foredraft.target.storage import LayerShape
from foredraft.target.views import find_layers

PROBE_TOKENS = 6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative error of one module; measured in bf16: up to 0.004. All layers in a row are allowed ten times that."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """How a model calls the attention of one layer."""

    module: nn.Module
    shape: LayerShape
    num_heads: int
    scaling: float | None
    window: int | None
    plain: bool


@dataclass(slots=True)
class LoweringReport:
    """How many modules of each kind were replaced, and which kinds were left as they are.

    ``layer_list`` is the name of the list of decoder layers, if they may run in one call.
    """

    replaced: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    layer_list: str | None = None

    def count(self, module: nn.Module, replaced: bool) -> None:
        counts = self.replaced if replaced else self.left
        counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1


def run_model(model: nn.Module, layout: PassLayout) -> Tensor:
    """One pass of the model over a layout; logits ``[num_logits (padded), vocab]``."""
    ready_mask = torch.zeros(1, 1, 1, 1, device=layout.token_ids.device)  # 4-D: models then build no mask of their own
    out = model(
        input_ids=layout.token_ids,
        position_ids=layout.positions,
        attention_mask=ready_mask,
        use_cache=False,
        logits_to_keep=layout.logits_index,
        layout=layout,
    )
    logits: Tensor = out.logits[0]
    return logits


def find_attention(model: nn.Module, device: torch.device) -> list[AttentionCall]:
    """Run the model once and note each layer's attention call, in the order of layers.

    Raises:
        UnsupportedModelError: a layer index is used twice or left out, so its cache could not be kept; a layer
            looks ahead; or the model does not hand its attention what it is given.
    """
    calls: dict[int, AttentionCall] = {}
    name, marker = type(model).__name__, object()

    def note(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if options.get("layout") is not marker:
            raise UnsupportedModelError(
                f"{name} does not pass extra arguments on to its attention; it is not supported"
            )
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(f"{name} looks ahead in layer {layer}; only causal models can be decoded")
        if layer in calls:
            raise UnsupportedModelError(
                f"{name} runs the attention of layer {layer} twice a pass; "
                "models that share key/value caches between layers are not supported"
            )
        calls[layer] = AttentionCall(
            module,
            LayerShape(key.shape[1], key.shape[3], value.shape[3]),
            query.shape[1],
            options.get("scaling"),
            options.get("sliding_window"),
            options.get("softcap") is None and options.get("s_aux") is None,
        )
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None

    AttentionInterface.register(ATTENTION_NAME, note)
    try:
        positions = torch.arange(PROBE_TOKENS, device=device)[None]
        with torch.inference_mode():
            model(
                input_ids=torch.tensor([_probe_tokens(model)], device=device),
                position_ids=positions,
                use_cache=False,
                attention_mask=torch.zeros(1, 1, 1, 1, device=device),
                layout=marker,
            )
    except UnsupportedModelError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{name} cannot run with attention from outside ({error}); not supported"
        ) from error
    finally:
        register_attention()
    layers = sorted(calls)
    if not layers or layers != list(range(len(layers))):
        raise UnsupportedModelError(
            f"{type(model).__name__} calls attention for layers {layers}; expected 0 to {len(layers) - 1} once each. "
            "Only decoder models whose every layer keeps a key/value cache are supported"
        )
    return [calls[layer] for layer in layers]


def lower(model: nn.Module, calls: list[AttentionCall], slots: KVSlots, native: ctypes.CDLL | None) -> LoweringReport:
    """Replace modules in place and free the weights that are no longer used.

    Raises:
        UnsupportedModelError: the packed model as a whole does not reproduce the original's logits.
    """
    report = LoweringReport()
    sequence = -1
    slots.open(sequence)
    rows = [PassRow(sequence, _probe_tokens(model), PROBE_TOKENS)]
    layout = build_layout(rows, slots, PassShape(), native)
    with torch.inference_mode():
        records, reference = _record(model, layout)
        by_attention = {id(call.module): call for call in calls}
        norms_first = sorted(_children(model), key=lambda child: not _is_norm(child[2]))
        for parent, name, module in norms_first:  # an attention module takes its norms along
            if id(module) not in records:
                continue
            args, kwargs, output = records.pop(id(module))
            for candidate in _candidates(module, by_attention.get(id(module)), native):
                if _reproduces(candidate, args, kwargs, output):
                    setattr(parent, name, candidate)
                    report.count(module, True)
                    break
            else:
                report.count(module, False)
        for parent, name, module in list(_children(model)):
            linear = _packed_linear(module, native)
            if linear is not None:
                setattr(parent, name, linear)
                report.count(module, True)
        logits = run_model(model, layout)
        if not _same(logits, reference, slack=10.0):
            raise UnsupportedModelError(
                f"{type(model).__name__} gives other logits once its weights are packed; load it with packed=False"
            )
        if native is not None:
            _pack_layers(model, layout, logits, report)
    slots.close(sequence)
    return report


def _pack_layers(model: nn.Module, layout: PassLayout, logits: Tensor, report: LoweringReport) -> None:
    """Replace all decoder layers by packed ones, if together they give these very logits."""
    try:
        name, layers = find_layers(model, len(layout.slots.layers))
    except UnsupportedModelError:
        return
    entries = [describe_layer(layer) for layer in layers]
    arena = Arena()
    packed = [PackedLayer(layer, entry, arena) for layer, entry in zip(layers, entries, strict=True) if entry]
    if len(packed) < len(layers):
        return
    try:
        same = torch.equal(LayerStack(model, name, packed)(layout), logits)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):  # it is built in another way
        return
    if same:
        for i, layer in enumerate(packed):
            report.count(layers[i], True)
            layers[i] = layer
        report.layer_list = name


def _probe_tokens(model: Any) -> list[int]:
    return [7 * (i + 1) % model.config.get_text_config().vocab_size for i in range(PROBE_TOKENS)]


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def _record(model: nn.Module, layout: PassLayout) -> tuple[dict[int, Any], Tensor]:
    """Arguments and outputs of every replaceable module during one pass, and the logits."""
    records: dict[int, Any] = {}

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        records[id(module)] = (args, kwargs, output)

    kinds = [m for m in model.modules() if _is_norm(m) or _is_gated_mlp(m) or _is_attention(m)]
    handles = [m.register_forward_hook(hook, with_kwargs=True) for m in kinds]
    try:
        return records, run_model(model, layout)
    finally:
        for handle in handles:
            handle.remove()


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), Tensor)


def _is_gated_mlp(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, f"{name}_proj", None), nn.Linear) for name in ("gate", "up", "down"))


def _is_attention(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, f"{name}_proj", None), nn.Linear) for name in ("q", "k", "v", "o"))


def _candidates(module: nn.Module, call: AttentionCall | None, native: ctypes.CDLL | None) -> Iterator[nn.Module]:
    module_any: Any = module
    if _is_norm(module):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(eps, float):
            yield PackedRMSNorm(module_any.weight, eps, native)
            yield PackedRMSNorm(1.0 + module_any.weight.float(), eps, native)
    elif _is_gated_mlp(module):
        act = getattr(module, "act_fn", None)
        if callable(act):
            gate_up = _fused(native, module_any.gate_proj, module_any.up_proj)
            yield PackedGatedMLP(gate_up, _fused(native, module_any.down_proj), act, native)
    elif call is not None and call.plain and call.shape.key_dim == call.shape.value_dim and call.scaling is not None:
        q_norm, k_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
        if any(norm is not None and norm.weight.numel() != call.shape.key_dim for norm in (q_norm, k_norm)):
            return  # normed over all heads at once (OLMo 2)
        qkv = _fused(native, module_any.q_proj, module_any.k_proj, module_any.v_proj)
        out = _fused(native, module_any.o_proj)
        layer, heads, shape = int(module_any.layer_idx), call.num_heads, call.shape
        for rotary in (True, False):
            yield PackedAttention(
                layer, qkv, out, heads, shape.num_kv_heads, shape.key_dim, call.scaling, call.window, q_norm, k_norm,
                rotary,
            )  # fmt: skip


def _fused(native: ctypes.CDLL | None, *linears: nn.Linear) -> PackedLinear:
    return PackedLinear([m.weight for m in linears], [m.bias for m in linears], native)


def _packed_linear(module: nn.Module, native: ctypes.CDLL | None) -> PackedLinear | None:
    if type(module) is nn.Linear:
        return _fused(native, module)
    if isinstance(module, Conv1D):
        return PackedLinear([module.weight.T], [module.bias], native)
    return None


def _reproduces(candidate: nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
    try:
        return _same(candidate(*args, **kwargs), output)
    except (RuntimeError, TypeError, ValueError):  # of another shape or kind than the candidate expects
        return False


def _same(ours: Any, theirs: Any, slack: float = 1.0) -> bool:
    """Whether two outputs agree up to the rounding of their dtype."""
    if isinstance(theirs, tuple):
        return _same(ours[0], theirs[0], slack)
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    error = (ours.float() - theirs.float()).norm()
    return bool(error <= slack * TOLERANCE.get(theirs.dtype, 1e-5) * theirs.float().norm().clamp_min(1e-6))


__all__ = ["AttentionCall", "LoweringReport", "attention_forward", "find_attention", "lower", "run_model"]
