"""What one decode step costs on a device, and from which batch on draft tokens stop being free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foredraft import theory
from foredraft.lab.devices import Device
from foredraft.lab.model_shape import ModelShape

CONTEXT_LENS = (1024, 4096, 16384, 65536, 131072)


@dataclass(frozen=True, slots=True)
class ContextCost:
    """A decode step at one context length.

    The KV cache's bytes per sequence, its share of a lone sequence's memory traffic, the plain ceiling in
    tokens per second with it, and the batches (sequences) that turn compute-bound without and with draft
    tokens, infinite where none does.
    """

    context_len: int
    kv_bytes: float
    kv_share: float
    ceiling_tokens_per_s: float
    compute_bound_batch: float
    compute_bound_batch_drafting: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a device.

    Seconds and tokens per second are those of a lone sequence with an empty context; the batches are numbers
    of sequences from which a pass is compute-bound, without and with ``num_draft_tokens`` each.
    """

    model: ModelShape
    device: Device
    bytes_per_param: float
    num_draft_tokens: int
    weight_read_s: float
    ceiling_tokens_per_s: float
    arithmetic_s: float
    compute_bound_batch: float
    compute_bound_batch_drafting: float
    contexts: tuple[ContextCost, ...]


def roofline(
    model: ModelShape,
    device: Device,
    *,
    bytes_per_param: float = 2.0,
    context_lens: Sequence[int] = (),
    num_draft_tokens: int = 4,
) -> Roofline:
    """Evaluate the formulas of :mod:`foredraft.theory` for one model and device.

    Of a mixture of experts only the active parameters are counted; with more sequences in a batch more
    experts are read, so its compute-bound batch is an underestimate.
    """
    params, bandwidth, flops = model.num_active_params, device.bandwidth_bytes_per_s, device.flops_per_s

    def batch(kv_bytes: float, tokens_per_sequence: int) -> float:
        return theory.compute_bound_batch(
            params,
            bytes_per_param,
            bandwidth_bytes_per_s=bandwidth,
            flops_per_s=flops,
            kv_bytes_per_sequence=kv_bytes,
            tokens_per_sequence=tokens_per_sequence,
        )

    def context_cost(context_len: int) -> ContextCost:
        kv_bytes = model.kv_bytes(context_len)
        return ContextCost(
            context_len=context_len,
            kv_bytes=kv_bytes,
            kv_share=theory.kv_share(params * bytes_per_param, kv_bytes),
            ceiling_tokens_per_s=bandwidth / (params * bytes_per_param + kv_bytes),
            compute_bound_batch=batch(kv_bytes, 1),
            compute_bound_batch_drafting=batch(kv_bytes, num_draft_tokens + 1),
        )

    return Roofline(
        model=model,
        device=device,
        bytes_per_param=bytes_per_param,
        num_draft_tokens=num_draft_tokens,
        weight_read_s=theory.weight_read_s(params, bytes_per_param, bandwidth),
        ceiling_tokens_per_s=theory.ceiling_tokens_per_s(params, bytes_per_param, bandwidth),
        arithmetic_s=theory.arithmetic_s(params, flops),
        compute_bound_batch=batch(0.0, 1),
        compute_bound_batch_drafting=batch(0.0, num_draft_tokens + 1),
        contexts=tuple(context_cost(length) for length in context_lens),
    )


def document(result: Roofline) -> dict[str, Any]:
    """The result as plain data; the model's layers are summed up in ``kv_bytes_per_token``."""
    fields = asdict(result)
    del fields["model"]["kv_layers"]
    fields["model"]["kv_bytes_per_token"] = result.model.kv_bytes_per_token
    return fields
