"""The check of the numerics: a kernel that depends on the shape of the pass is noticed, the answer is kept."""

from __future__ import annotations

import json
import math

import pytest
import torch

from foredraft.config import EngineConfig
from foredraft.target import selfcheck
from foredraft.target.layout import PassShape
from foredraft.target.packed import PackedLinear
from foredraft.target.selfcheck import FAST, NEAR_TIE, TOKEN_IDENTICAL, find_shape, largest_difference, settle_numerics
from foredraft.testing import target_for, tiny_model


@pytest.fixture
def target():
    return target_for(tiny_model(max_position_embeddings=128))


def patch_kernel(target, change) -> None:
    """Let the first product of the model go through ``change(y, num_rows)``."""
    linear = next(m for m in target.model.modules() if isinstance(m, PackedLinear))
    kernel = linear.kernel

    def changed(x: torch.Tensor) -> torch.Tensor:
        return change(kernel(x), x.numel() // x.shape[-1])

    linear.kernel = changed


@pytest.fixture
def steady():
    """A model in bf16 whose own kernels do not depend on the shape, so that only the patch can be found."""
    model = target_for(tiny_model(max_position_embeddings=128), dtype=torch.bfloat16)
    if model.native is None:
        pytest.skip("without the C++ kernels a model's bits may depend on the shape in any case")
    assert largest_difference(model, PassShape(min_tokens=1, min_queries=1)) == 0.0
    return model


def test_kernels_that_are_steady_need_no_padding(steady):
    """The narrowest shape holds, and no difference was seen."""
    found = find_shape(steady)
    assert (found.contract, found.shape, found.max_difference) == (TOKEN_IDENTICAL, selfcheck.CANDIDATES[0], 0.0)


def test_a_kernel_that_depends_on_odd_numbers_of_rows_is_near_tie(steady):
    """No minimum of rows helps; the contract says so and the difference is reported."""
    patch_kernel(steady, lambda y, rows: y * (1.02 if rows % 2 else 1.0))
    found = find_shape(steady)
    assert (found.contract, found.shape) == (NEAR_TIE, PassShape())
    assert 0 < found.max_difference < 100
    assert found.seconds > 0


@pytest.mark.parametrize(("from_rows", "min_tokens"), [(2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_a_kernel_for_few_rows_widens_the_passes(steady, from_rows, min_tokens):
    """Another kernel below so many rows: passes are padded up to it, and no further."""
    patch_kernel(steady, lambda y, rows: y * (1.02 if rows < from_rows else 1.0))
    found = find_shape(steady)
    assert (found.contract, found.shape.min_tokens) == (TOKEN_IDENTICAL, min_tokens)
    assert found.max_difference > 0
    assert steady.shape == found.shape


@pytest.mark.parametrize("rows", [17, 18])
def test_the_check_sees_neighbours_and_chunks(steady, rows):
    """A kernel that changes for one number of rows only, met by a chunk of the prompt (17) or in a crowd (18)."""
    patch_kernel(steady, lambda y, num_rows: y * (1.02 if num_rows == rows else 1.0))
    assert largest_difference(steady, PassShape()) > 0


def test_the_check_leaves_the_model_as_it_was(target):
    """No slot stays open, whatever was found."""
    find_shape(target)
    assert target.slots.num_open == 0
    target.slots.check_integrity()


def test_the_answer_is_kept_and_read_back(target, tmp_path, monkeypatch):
    """The second start takes no time; another fingerprint or limit is another question."""
    config = EngineConfig(model="x", cache_dir=str(tmp_path))
    calls = []
    find = selfcheck.find_shape
    monkeypatch.setattr(selfcheck, "find_shape", lambda t: calls.append(1) or find(t))
    first = settle_numerics(target, "a", config)
    target.shape = PassShape(min_tokens=99)
    second = settle_numerics(target, "a", config)
    assert len(calls) == 1
    assert (second.contract, second.shape, second.seconds) == (first.contract, first.shape, 0.0)
    assert target.shape == first.shape
    settle_numerics(target, "b", config)
    assert len(calls) == 2
    target.max_model_len -= 1
    settle_numerics(target, "a", config)
    assert len(calls) == 3
    assert len(list((tmp_path / "numerics").iterdir())) == 3


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"contract": "x"}', '{"shape": {"nonsense": 1}}'])
def test_a_damaged_answer_is_found_again(target, tmp_path, damage):
    """A file cut short by a full disk is no error."""
    config = EngineConfig(model="x", cache_dir=str(tmp_path))
    first = settle_numerics(target, "a", config)
    (file,) = (tmp_path / "numerics").iterdir()
    file.write_text(damage)
    assert settle_numerics(target, "a", config).shape == first.shape
    assert json.loads(file.read_text())["contract"] == first.contract


def test_fast_numerics_promise_less_and_check_nothing(target, tmp_path):
    """The narrowest passes, contract near-tie, nothing measured or written."""
    found = settle_numerics(target, "a", EngineConfig(model="x", numerics="fast", cache_dir=str(tmp_path)))
    assert (found.contract, found.shape) == (NEAR_TIE, FAST)
    assert math.isnan(found.max_difference)
    assert target.shape == FAST
    assert not (tmp_path / "numerics").exists()


@pytest.mark.parametrize("max_model_len", [4, 16, 31, 33, 40])
def test_a_short_model_can_be_checked(max_model_len):
    """The texts are cut to what the model takes."""
    target = target_for(tiny_model(max_position_embeddings=128), max_model_len=max_model_len)
    assert find_shape(target).contract in (NEAR_TIE, TOKEN_IDENTICAL)
    assert target.slots.num_open == 0
