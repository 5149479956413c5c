"""What each of the unrolled heads does in its own way: kinds of MTP layers, scales, tokens that are not taught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from foredraft.errors import UnsupportedModelError
from foredraft.heads.checkpoint import read_head
from foredraft.heads.eagle_format import read_eagle
from foredraft.heads.mtp_format import read_mtp, read_mtp_files
from foredraft.target.features import AFTER_NORM
from foredraft.testing import random_model, tiny_config, tiny_texts
from foredraft.testing.state_heads import KIND_OPTIONS
from foredraft.train import eagle, mlp, mtp
from foredraft.train.batches import Batch, collate, windows_of
from foredraft.train.options import TrainOptions
from foredraft.train.trainee import Trainee, TrainTarget, TrainTexts


@pytest.fixture(scope="module")
def texts(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainTexts:
    return TrainTexts(
        tiny_texts(tiny, tmp_path_factory.mktemp("texts"), (AFTER_NORM,), num_texts=8), list(range(7)), [7]
    )


@pytest.fixture
def batch(texts: TrainTexts) -> Batch:
    store = texts.store
    windows = [windows_of(i, store.num_prompt_tokens(i), len(store.token_ids(i)), 512)[0] for i in (3, 6)]
    return collate(store, windows)


def learn(trainee: Trainee, batch: Batch, num_updates: int, num_steps: int = 2) -> list[float]:
    optimizer = torch.optim.Adam(trainee.parameters(), lr=2e-3)
    losses = []
    for _ in range(num_updates):
        loss = trainee(batch, num_steps, None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


KINDS = {
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {"first_k_dense_replace": 1}),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_mtp_module_has_a_layer_of_the_targets_kind(texts: TrainTexts, batch: Batch, tmp_path: Path, kind: str):
    """With experts; it learns, and what is written is read as the module that was trained."""
    model_class, config_class, more = KINDS[kind]
    options = tiny_config().to_dict()
    del options["model_type"], options["head_dim"]
    model = random_model(model_class, config_class(**options | KIND_OPTIONS[kind] | more), seed=0)
    trainee = mtp.make(TrainTarget(model, "tiny", ()), texts, TrainOptions(method="mtp"))
    losses = learn(trainee, batch, 6)
    assert losses[-1] < losses[0]
    trainee.save(tmp_path)
    head = read_mtp(read_mtp_files(str(tmp_path)), 64, 64, 2)
    assert head.config.layer.model_type == kind
    assert any("experts" in name for name in head.state_dict())
    with torch.no_grad():
        states, tokens = batch.states(AFTER_NORM).float(), batch.token_ids
        there = list(trainee.head.unroll_states(states, tokens, trainee.embeddings, 3))
        here = list(head.unroll_states(states, tokens, trainee.embeddings, 3))
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


def test_a_kind_whose_layers_are_not_known():
    model = random_model(LlamaForCausalLM, tiny_config(), seed=0)
    model.config.model_type = "abacus"
    with pytest.raises(UnsupportedModelError, match="tiny is of the kind 'abacus'; known are .* train eagle3 or eagle"):
        mtp.check_target(TrainTarget(model, "tiny", ()))


def test_an_eagle_head_is_written_for_states_as_they_are(tiny: Any, texts: TrainTexts, batch: Batch, tmp_path: Path):
    """It was trained on states divided by their scale, and gives the target's, not divided."""
    trainee = eagle.make(TrainTarget(tiny, "tiny", ()), texts, TrainOptions(method="eagle"))
    trainee.scales.fill_(2.5)
    learn(trainee, batch, 3)
    trainee.save(tmp_path)
    head = read_eagle(read_head(str(tmp_path)), 64, 64, 2)
    with torch.no_grad():
        states, tokens = batch.states(AFTER_NORM).float(), batch.token_ids
        there = trainee.head.unroll_states(states / trainee.scales, tokens, trainee.embeddings, 3)
        here = head.unroll_states(states, tokens, trainee.embeddings, 3)
        for theirs, ours in zip(there, here, strict=True):
            assert torch.allclose(theirs * trainee.scales, ours, rtol=1e-3, atol=1e-3)


def test_the_loss_of_eagle(tiny: Any, texts: TrainTexts):
    """Smooth L1 of states and a tenth of the entropy of laws, summed over rows."""
    trainee = eagle.make(TrainTarget(tiny, "tiny", ()), texts, TrainOptions(method="eagle"))
    true = torch.randn(6, 64)
    law = tiny.lm_head(true * trainee.scales).softmax(-1)
    said = tiny.lm_head((true + 0.5) * trainee.scales).log_softmax(-1)
    expected = 6 * 0.125 - 0.1 * (law * said).sum()  # 0.5 * 0.5^2 a coordinate
    assert torch.allclose(trainee.loss(true + 0.5, 0, law, true), expected, rtol=1e-5)


def test_the_loss_of_an_mlp_speculator_is_that_of_its_whole_head(tiny: Any, texts: TrainTexts, batch: Batch):
    """Tokens that are not taught have rows of 0 before and after training, and count in the law."""
    options = TrainOptions(method="mlp", draft_vocab_size=20)
    trainee = mlp.make(TrainTarget(tiny, "tiny", ()), texts, options)
    learn(trainee, batch, 3)
    untaught = torch.ones(64, dtype=torch.bool)
    untaught[trainee.taught] = False
    assert not trainee.head.head[0].weight[untaught].any()
    states, law = torch.randn(5, 64), torch.rand(5, 20).softmax(-1)
    whole = torch.zeros(5, 64)
    whole[:, trainee.taught] = law
    expected = -(whole * trainee.head.logits(states, 1).log_softmax(-1)).sum()
    assert torch.allclose(trainee.loss(states, 1, law, states), expected, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_steps_of_an_mlp_speculator(tiny: Any, texts: TrainTexts, batch: Batch, tied: bool):
    """As many guesses as it has steps; tied ones have one head."""
    options = TrainOptions(method="mlp", num_heads=3, tie_weights=tied)
    trainee = mlp.make(TrainTarget(tiny, "tiny", ()), texts, options)
    assert len(trainee.head.head) == (1 if tied else 3)
    losses = learn(trainee, batch, 6)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        guesses = trainee.guesses(batch, 4)
    assert (guesses[batch.is_label][1:, :3] >= 0).all()
    assert (guesses[..., 3] == -1).all()


@pytest.mark.parametrize("method", [eagle, mtp])
def test_a_token_that_is_not_taught_can_be_drafted(
    tiny: Any, texts: TrainTexts, batch: Batch, tmp_path: Path, method: Any
):
    """What wins among few tokens and not among all is not counted as right."""
    options = TrainOptions(method=method.__name__.rpartition(".")[2], draft_vocab_size=20)
    trainee = method.make(TrainTarget(tiny, "tiny", ()), texts, options)
    learn(trainee, batch, 10)
    states = next(iter(trainee.head.unroll_states(trainee.states(batch), batch.token_ids, trainee.embeddings, 1)))
    states = states.detach().flatten(0, 1)
    among_few = trainee.token_ids[trainee.logits(states, 0).argmax(-1)]
    among_all = trainee.whole_logits(states).argmax(-1)
    assert 0 < int((among_few == among_all).sum()) < len(states)
    assert torch.equal(trainee.best(states, 0, labels=among_few), among_all)
