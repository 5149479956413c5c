"""A profile of a tiny model: what it measures, and what the command shows of it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from foredraft import LLM
from foredraft.cli import app
from foredraft.engine.profile import PassSample, settle_pass_samples
from foredraft.measure.profile import Profile, StepSample, measure_profile, measure_steps, profile_document
from foredraft.policy import PassTable
from foredraft.testing import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(1, max_position_embeddings=300).save_pretrained(path)
    return path


def test_steps_are_measured_with_real_drafts_and_leave_the_engine_as_it_was(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.measure.profile.BATCHES", (1, 4))
    with LLM(str(folder), speculative_config={"method": "ngram"}, cache_dir=str(tmp_path)) as llm:
        policy = llm.engine.policy
        found = measure_steps(llm.engine, 3, 4, 5)
        assert (found.batch_size, found.num_draft_tokens) == (3, 4)
        assert 0 < found.num_drafted <= 12
        assert min(found.draft_s, found.target_s, found.verify_s, found.host_s) > 0
        assert 0 < found.host_share < 1
        assert llm.engine.policy is policy
        assert not llm.engine.has_unfinished_requests
        told = []
        profile = measure_profile(llm, refresh=False, threads=1, tell=lambda label, done: told.append(done))
        assert told == sorted(told)
        assert {step.num_draft_tokens for step in profile.steps} == {0, 1, 4, 7}
        assert {step.batch_size for step in profile.steps} == {1, 4}
        kept = settle_pass_samples(llm.engine.target, llm.loaded.fingerprint, llm.config)
        assert kept == profile.samples, "the passes are kept"


def test_the_draft_cost_is_relative_to_a_pass():
    """Four tokens for each of some rows took 8 ms, a pass of one token 10 ms: c is 0.2."""
    table = PassTable((1, 8), (0.010, 0.012), 1e-6, 1e-7)
    step = StepSample(2, 4, 8.0, 0.008, 0.02, 0.001, 0.001)
    profile = Profile("m", "draft_model", "float32", "cpu", 1, [PassSample(1, 1, 17, 0.01)], table, [step])
    document = profile_document(profile, "foredraft profile m")
    assert document["steps"][0]["c"] == pytest.approx(0.2)
    assert document["steps"][0]["host_share"] == pytest.approx(1 / 30, abs=1e-4)
    assert document["free_tokens"] == 1


def test_the_command_shows_tables_a_picture_and_one_document(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.measure.profile.BATCHES", (1, 4))
    picture = tmp_path / "profile.svg"
    runner = CliRunner(env={"COLUMNS": "140", "NO_COLOR": "1", "TERM": "dumb"})
    result = runner.invoke(
        app, ["profile", str(folder), "--draft-model", str(folder), "-k", "2", "--plot", str(picture)]
    )
    assert result.exit_code == 0, result.output
    assert "A pass of the target, ms" in result.stdout
    assert "costs at most a tenth more" in result.stdout
    assert "A step with drafts: draft model, ms" in result.stdout
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["method"] == "draft_model"
    assert all(step["c"] > 0.05 for step in document["steps"] if step["num_draft_tokens"]), "it runs a model"
    assert document["table"]["num_tokens"][0] == 1
    assert len(document["passes"]) > 15
    assert "free up to" in picture.read_text()
    refused = runner.invoke(app, ["profile", str(folder), "--plot", str(tmp_path / "profile.abc")])
    assert refused.exit_code == 2
    assert "cannot plot to 'profile.abc'" in refused.stderr
