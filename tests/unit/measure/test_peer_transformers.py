"""The peer: passes and drafts are counted by hooks, end tokens ignored, nothing of the model changed."""

import json
import shutil

import pytest

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.engine.llm import LLM
from foredraft.measure.arms import ForedraftArm
from foredraft.measure.peer_transformers import PeerModel, TransformersArm
from foredraft.measure.workloads import built_in_workload
from foredraft.target.loader import load_model

MAX_TOKENS = 40


@pytest.fixture(scope="module")
def peer(model_folder) -> PeerModel:
    return PeerModel(EngineConfig(model=str(model_folder)), str(model_folder))


@pytest.fixture(scope="module")
def prompt(tokenizer) -> tuple[int, ...]:
    return built_in_workload("code", tokenizer, 1024).prompts[0]


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counts_add_up(peer, prompt, method, temperature):
    arm = TransformersArm(peer, method, None)
    run = arm.run(prompt, temperature=temperature, seed=3, max_tokens=MAX_TOKENS)
    assert len(run.token_ids) == MAX_TOKENS == sum(run.emitted)
    assert run.num_target_passes == len(run.emitted) == len(run.drafted)
    assert all(0 <= drafted <= arm.num_speculative_tokens for drafted in run.drafted)
    assert all(emitted <= drafted + 1 for drafted, emitted in zip(run.drafted, run.emitted, strict=True))
    assert any(run.drafted) == (method != "none")
    assert 0 < run.first_s < run.total_s
    split = run.split
    assert split.draft_s + split.target_s + split.verify_s + split.host_s == pytest.approx(run.total_s)
    assert (split.draft_s > 0) == (method == "draft_model")


def test_methods_of_both_engines_agree_in_float32(peer, prompt, model_folder):
    """Greedy tokens are the same everywhere; so is the number of passes of plain decoding."""
    llm = LLM(str(model_folder), numerics="fast")
    ours = [
        ForedraftArm(llm, SpeculativeConfig(method="none")),
        ForedraftArm(llm, SpeculativeConfig(method="ngram")),
    ]
    peers = [TransformersArm(peer, method, None) for method in ("none", "ngram", "draft_model")]
    runs = [arm.run(prompt, temperature=0.0, seed=0, max_tokens=MAX_TOKENS) for arm in (*ours, *peers)]
    assert all(run.token_ids == runs[0].token_ids for run in runs)
    assert runs[0].num_target_passes == runs[2].num_target_passes == MAX_TOKENS
    assert runs[1].num_target_passes == len(runs[1].emitted) < MAX_TOKENS


def test_an_end_token_does_not_end_a_run(peer, prompt, model_folder, tmp_path):
    """A copy of the model that takes for its end token what it is about to say."""
    said = TransformersArm(peer, "none", None).run(prompt, temperature=0.0, seed=0, max_tokens=MAX_TOKENS).token_ids
    folder = tmp_path / "ends-early"
    shutil.copytree(model_folder, folder)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, "eos_token_id": said[1]}))
    assert load_model(folder).eos_token_ids == (said[1],)
    ending = PeerModel(EngineConfig(model=str(folder)), str(folder))
    for method in ("none", "ngram", "draft_model"):
        run = TransformersArm(ending, method, None).run(prompt, temperature=0.0, seed=0, max_tokens=MAX_TOKENS)
        assert run.token_ids == said
    llm = LLM(str(folder), numerics="fast")
    assert said[1] in llm.engine.eos_token_ids
    ours = ForedraftArm(llm, SpeculativeConfig(method="ngram"))
    assert ours.run(prompt, temperature=0.0, seed=0, max_tokens=MAX_TOKENS).token_ids == said


def test_a_seed_repeats_a_sample(peer, prompt):
    arm = TransformersArm(peer, "none", None)
    runs = [arm.run(prompt, temperature=1.0, seed=seed, max_tokens=20).token_ids for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_number_of_draft_tokens_can_be_set(peer, prompt):
    arm = TransformersArm(peer, "draft_model", 2)
    run = arm.run(prompt, temperature=0.0, seed=0, max_tokens=MAX_TOKENS)
    assert max(run.drafted) == 2
    assert run.num_target_passes == pytest.approx(MAX_TOKENS / 3, abs=1)
