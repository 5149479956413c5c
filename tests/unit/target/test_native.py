"""The C++ kernels: right to bf16's rounding, and the same bits for a row whatever else is in the pass.

The reference is torch's own path in float32 on the same bf16 inputs. Skipped where the kernels cannot run.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foredraft.target import native_build
from foredraft.target.attention import attend, rotate_and_store
from foredraft.target.layout import PassRow, PassShape, build_layout
from foredraft.target.native_build import native_library
from foredraft.target.packed import PackedGatedMLP, PackedLinear, PackedRMSNorm, rotate
from foredraft.target.slots import KVSlots
from foredraft.target.storage import LayerShape
from foredraft.target.zoo import cache_folder

LENGTHS = (3, 200, 700, 17)
WIDTHS = (1, 5, 40, 2)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def native():
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU has no AVX512-BF16")
    library = native_library(cache_folder())
    if library is None:
        pytest.skip("no C++ compiler, or no OpenMP runtime beside torch")
    return library


def random_bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def attention_of(library, heads: int, kv_heads: int, dim: int, sinks: bool = False, **options) -> torch.Tensor:
    """Rows of several widths over caches of several lengths; float32 without a library."""
    dtype = BF16 if library else torch.float32
    slots = KVSlots([LayerShape(kv_heads, dim, dim)], dtype, torch.device("cpu"), 2048)
    for i, length in enumerate(LENGTHS):
        slots.open(i)
        slots.keys[0][i, :length] = random_bf16(length, kv_heads, dim, seed=10 + i)
        slots.values[0][i, :length] = random_bf16(length, kv_heads, dim, seed=20 + i)
        slots.commit(i, length)
        slots.reserve(1500)  # the storage grows between sequences
    rows = [PassRow(i, [1] * width, width) for i, width in enumerate(WIDTHS)]
    layout = build_layout(rows, slots, PassShape(), library)
    query = random_bf16(sum(WIDTHS), heads, dim, seed=1).to(dtype)
    key, value = (random_bf16(sum(WIDTHS), kv_heads, dim, seed=s).to(dtype) for s in (2, 3))
    if sinks:
        options["sinks"] = random_bf16(heads, seed=4).to(dtype)
    return attend(0, query, key, value, layout, scaling=dim**-0.5, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 50}, {"window": 1}, {"softcap": 20.0}, {"sinks": True}, {"window": 7, "softcap": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 8, 128), (4, 1, 256), (6, 2, 32)], ids=str)
def test_attention_is_that_of_float32(native, heads, options):
    """All head sizes and group sizes, with windows, capped scores and sinks."""
    ours, theirs = attention_of(native, *heads, **options), attention_of(None, *heads, **options)
    assert relative_error(ours, theirs) < 5e-3
    worst_row = (ours.float() - theirs).flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1)
    assert float(worst_row.max()) < 2e-2  # one row that is wrong is not lost among many


def fed_in_chunks(library, neighbours: dict[int, int], chunks: list[int], first: int, window: int | None):
    """The tokens of one text from ``first`` on, fed in ``chunks`` among neighbours; outputs end to end."""
    heads, kv_heads, dim = 6, 2, 64
    slots = KVSlots([LayerShape(kv_heads, dim, dim)], BF16, torch.device("cpu"), 4096)
    total = first + sum(chunks)
    query, key, value = (random_bf16(total, n, dim, seed=s) for n, s in ((heads, 1), (kv_heads, 2), (kv_heads, 3)))
    for sequence, length in neighbours.items():
        slots.open(sequence)
        slots.reserve(length + 64)
        slots.keys[0][slots.slot(sequence), :length] = random_bf16(length, kv_heads, dim, seed=50 + sequence)
        slots.commit(sequence, length)
    slots.open(0)
    slots.keys[0][slots.slot(0), :first], slots.values[0][slots.slot(0), :first] = key[:first], value[:first]
    slots.commit(0, first)
    outputs, at = [], first
    for width in chunks:
        rows = [PassRow(s, [1] * (1 + s % 3), 1) for s in neighbours] + [PassRow(0, [1] * width, width)]
        layout = build_layout(rows, slots, PassShape(min_tokens=1, min_queries=1), library)
        num_others = layout.token_ids.shape[1] - width

        def joined(own: torch.Tensor, at=at, width=width, num_others=num_others) -> torch.Tensor:
            others = random_bf16(num_others, *own.shape[1:], seed=90)
            return torch.cat([others, own[at : at + width]])

        out = attend(0, joined(query), joined(key), joined(value), layout, scaling=0.125, window=window)
        outputs.append(out[num_others:])
        slots.commit(0, width)
        at += width
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 20])
def test_attention_bits_do_not_depend_on_batch_or_chunks(native, window):
    """A row alone, among longer neighbours, and cut into any chunks gives the same bits."""
    alone = fed_in_chunks(native, {}, [1] * 24, first=37, window=window)
    for neighbours in ({}, {1: 5}, {1: 700, 2: 40, 3: 1500}):
        for chunks in ([24], [5] * 4 + [4], [1, 7, 16], [23, 1]):
            out = fed_in_chunks(native, neighbours, chunks, first=37, window=window)
            assert torch.equal(out, alone), (neighbours, chunks)


def test_attention_bits_do_not_depend_on_stale_scratch(native):
    """What rejected drafts left past the length has no weight, whatever it is."""
    outputs = []
    for scratch in (0.0, 3e4):
        slots = KVSlots([LayerShape(1, 32, 32)], BF16, torch.device("cpu"), 256)
        slots.open(0)
        slots.keys[0].fill_(scratch), slots.values[0].fill_(scratch)
        slots.keys[0][0, :5], slots.values[0][0, :5] = random_bf16(5, 1, 32), random_bf16(5, 1, 32, seed=1)
        slots.commit(0, 5)
        layout = build_layout([PassRow(0, [1, 1], 2)], slots, PassShape(), native)
        q, k, v = random_bf16(2, 2, 32, seed=2), random_bf16(2, 1, 32, seed=3), random_bf16(2, 1, 32, seed=4)
        outputs.append(attend(0, q, k, v, layout, scaling=0.2))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(64, 96), (130, 48), (32, 1), (62, 33)], ids=str)
def test_linear_bits_do_not_depend_on_the_number_of_rows(native, sizes, bias):
    """1 to 40 rows, outputs that fill no block of 32, more than one weight."""
    num_inputs, num_outputs = sizes
    weights = [random_bf16(num_outputs, num_inputs, seed=1), random_bf16(7, num_inputs, seed=2)]
    biases = [random_bf16(num_outputs, seed=3) if bias else None, None]
    linear = PackedLinear(weights, biases, native)
    x = random_bf16(40, num_inputs)
    whole = linear(x)
    for rows in range(1, 41):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
        assert torch.equal(linear(x[40 - rows :]), whole[40 - rows :]), rows
    exact = F.linear(x.float(), torch.cat(weights).float())
    if bias:
        exact[:, :num_outputs] += biases[0].float()
    assert relative_error(whole, exact) < 5e-3


def test_linear_takes_strided_rows_and_a_leading_axis(native):
    """A slice of a wider tensor, and [1, T, K], as models give them."""
    linear = PackedLinear([random_bf16(40, 64, seed=1)], [None], native)
    wide = random_bf16(9, 200)
    part = wide[:, 64:128]
    assert torch.equal(linear(part), linear(part.contiguous()))
    assert torch.equal(linear(part[None]), linear(part.contiguous())[None])
    assert linear(wide[None, :, 64:128]).shape == (1, 9, 40)


@pytest.mark.parametrize("width", [16, 30, 576])
def test_rms_norm_is_the_formula(native, width):
    """x / sqrt(mean(x^2) + eps) * weight; widths that fill no vector."""
    x, weight = random_bf16(19, width), random_bf16(width, seed=1)
    norm = PackedRMSNorm(weight, 1e-5, native)
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()
    assert relative_error(norm(x), exact) < 3e-3
    assert torch.equal(norm(x[3:4]), norm(x)[3:4])


@pytest.mark.parametrize("width", [16, 50, 96])
def test_silu_mul_is_the_formula(native, width):
    """silu(gate) * up, also for gates that saturate and widths that fill no vector."""
    gate_up = PackedLinear([torch.eye(2 * width, dtype=BF16)], [None], native)
    down = PackedLinear([torch.eye(width, dtype=BF16)], [None], native)
    mlp = PackedGatedMLP(gate_up, down, torch.nn.SiLU(), native)
    x = random_bf16(17, 2 * width) * 3
    x[0, :4] = torch.tensor([-100.0, 100.0, -20.0, 0.0])
    exact = F.silu(x[:, :width].float()) * x[:, width:].float()
    assert relative_error(mlp(x), exact) < 4e-3
    assert torch.isfinite(mlp(x)).all()


@pytest.mark.parametrize("positions", [True, False])
def test_rotate_and_store_is_the_formula(native, positions):
    """Queries and keys rotated, keys and values at their slots, nothing else touched."""
    heads, kv_heads, dim = 4, 2, 64
    slots = KVSlots([LayerShape(kv_heads, dim, dim)], BF16, torch.device("cpu"), 256)
    for sequence in (0, 1):
        slots.open(sequence)
    slots.commit(1, 3)
    layout = build_layout([PassRow(0, [1] * 20, 1), PassRow(1, [1, 1], 1)], slots, PassShape(), native)
    qkv = random_bf16(22, heads + 2 * kv_heads, dim)
    angles = torch.cat([torch.randn(22, dim // 2, generator=torch.Generator().manual_seed(5))] * 2, -1)[None]
    cos_sin = (angles.cos().to(BF16), angles.sin().to(BF16)) if positions else None
    query = rotate_and_store(0, qkv, cos_sin, layout, heads)
    exact = qkv[:, : heads + kv_heads].float()
    if cos_sin is not None:
        exact = rotate(exact, *(t.float() for t in cos_sin))
    assert relative_error(query, exact[:, :heads]) < 4e-3
    stored = torch.cat([slots.keys[0][0, :20], slots.keys[0][1, 3:5]])
    assert relative_error(stored, exact[:, heads:]) < 4e-3
    values = torch.cat([slots.values[0][0, :20], slots.values[0][1, 3:5]])
    assert torch.equal(values, qkv[:, heads + kv_heads :])
    assert not slots.keys[0][1, :3].any()
    assert not slots.values[0][0, 20:].any()


def test_a_compiler_that_fails_warns_and_gives_none(native, tmp_path, monkeypatch):
    """The engine then runs on torch's own kernels; the message is the compiler's."""
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent), prepend=":")
    with pytest.warns(UserWarning, match="no such thing"):
        assert native_build.native_library(tmp_path / "cache") is None
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_no_compiler_or_no_instructions_gives_none_in_silence(tmp_path, monkeypatch, recwarn):
    """Nothing to say: torch's kernels are the normal path there."""
    monkeypatch.setattr(native_build.shutil, "which", lambda _: None)
    assert native_build.native_library(tmp_path / "a") is None
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert native_build.native_library(tmp_path / "b") is None
    assert not recwarn.list
