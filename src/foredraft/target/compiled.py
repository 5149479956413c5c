"""The model through torch.compile: one graph for passes of every shape, compiled once at load.

    graph      embed | norm | product | rotate | attend | product | ... | head      T tokens, L logits: symbols
    outside                      |                 |
               packed weights ---+      slots, rows of the pass, masks

Attention and packed products are opaque operators. They find the pass and the weights in a context variable when
they run, so nothing of it is baked into the graph: sequences come and go, slots grow, pass shapes change. A graph
cannot be open for sizes of 0 and 1; compiled passes have at least two tokens and two rows of logits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.errors import UnsupportedModelError
from foredraft.target.attention import attend
from foredraft.target.layout import PassLayout, PassRow, PassShape, build_layout
from foredraft.target.lowering import run_model
from foredraft.target.packed import PackedGatedMLP, PackedLinear, PackedRMSNorm
from foredraft.target.slots import KVSlots

EXAMPLE_TOKENS = 8
"""Tokens of the pass with which the graph is traced; the compiler tunes its loops for about this many."""


@dataclass(frozen=True, slots=True)
class _Running:
    """What the operators of a running graph work on."""

    layout: PassLayout
    products: list[Callable[[Tensor], Tensor]]


@dataclass(frozen=True, slots=True)
class _Visible:
    """What a graph sees of a pass; ``native`` is None so that modules take the way that can be traced."""

    token_ids: Tensor
    positions: Tensor
    logits_index: Tensor
    native: None = None


class CompiledModel:
    """A model that runs each pass as one graph. Compiles when made: a minute, or seconds from the cache.

    Args:
        model: changed in place: its packed modules are only good for this class afterwards.
        slots: of the target; a sequence is opened and closed for the first pass.
        folder: what the compiler makes is kept here, under ``compiled``.

    Raises:
        UnsupportedModelError: the model is not one graph, or there is no C++ compiler.
    """

    def __init__(self, model: nn.Module, slots: KVSlots, folder: Path):
        self._model = model
        self._products = _make_opaque(model) if slots.device.type == "cpu" else []
        # A copy, since graphs belong to code objects and two models must not find each other's.
        step = FunctionType(run_model.__code__.replace(), run_model.__globals__)
        # Only this class calls it, so nothing but shapes can change; checking every weight costs 4% of a pass.
        options: dict[str, Any] = {"guard_filter_fn": _keep_shapes}
        with _compiler_cache(folder / "compiled"):
            self._graph = torch.compile(step, fullgraph=True, dynamic=False, options=options)
            self._compile(slots)

    def __call__(self, layout: PassLayout) -> Tensor:
        """One pass; logits ``[num_logits (padded), vocab]``."""
        wanted = layout.logits_index if layout.num_logits else layout.write_index.new_zeros(2)
        token = _RUNNING.set(_Running(layout, self._products))
        try:
            logits: Tensor = self._graph(self._model, _Visible(layout.token_ids, layout.positions, wanted))
        finally:
            _RUNNING.reset(token)
        return logits

    @staticmethod
    def widened(shape: PassShape) -> PassShape:
        """The shape with the two tokens that a compiled pass needs."""
        return shape if shape.min_tokens > 1 else replace(shape, min_tokens=2)

    def _compile(self, slots: KVSlots) -> None:
        sequence = -1
        slots.open(sequence)
        layout = build_layout([PassRow(sequence, [0] * EXAMPLE_TOKENS, EXAMPLE_TOKENS)], slots, PassShape())
        for tensor in (layout.token_ids, layout.positions, layout.logits_index):
            torch._dynamo.mark_dynamic(tensor, tensor.dim() - 1)
        try:
            with torch.inference_mode():
                self(layout)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise UnsupportedModelError(
                f"{type(self._model).__name__} cannot be compiled: {reason}; leave compile at False"
            ) from error
        finally:
            slots.close(sequence)


class _OpaqueProduct:
    """A packed product as the operator that finds it by its number."""

    def __init__(self, number: int, num_outputs: int):
        self.number, self.num_outputs = number, num_outputs

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.foredraft.product(x, self.number, self.num_outputs)
        return y


def _make_opaque(model: nn.Module) -> list[Callable[[Tensor], Tensor]]:
    """Hide packed products behind operators and leave all else to the compiler; returns the products."""
    products = []
    for module in model.modules():
        if isinstance(module, PackedLinear):
            products.append(module.kernel)
            module.kernel = _OpaqueProduct(len(products) - 1, module.out_features)
        elif isinstance(module, PackedRMSNorm | PackedGatedMLP):
            module.native = None
    return products


def _keep_shapes(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]


@contextmanager
def _compiler_cache(folder: Path) -> Iterator[None]:
    """Let torch keep what it compiles in ``folder``; its only setting for that is an environment variable."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


# -- the operators; defined by the low-level interface, which costs half of torch.library.custom_op a call ----------

_RUNNING: ContextVar[_Running] = ContextVar("foredraft_running")
_LIBRARY = torch.library.Library("foredraft", "DEF")
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float scaling, float? softcap, int? window, "
    "Tensor? sinks) -> Tensor"
)
_LIBRARY.define("product(Tensor x, int number, int num_outputs) -> Tensor")


@torch.library.impl(_LIBRARY, "attend", "CompositeExplicitAutograd")
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    scaling: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    layout = _RUNNING.get().layout
    out = attend(layer, query, key, value, layout, scaling=scaling, softcap=softcap, window=window, sinks=sinks)
    return out.contiguous()


@torch.library.register_fake("foredraft::attend", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _attend_shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[2])


@torch.library.impl(_LIBRARY, "product", "CompositeExplicitAutograd")
def _product(x: Tensor, number: int, num_outputs: int) -> Tensor:
    return _RUNNING.get().products[number](x)


@torch.library.register_fake("foredraft::product", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _product_shape(x: Tensor, number: int, num_outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)
