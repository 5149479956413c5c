"""From runs to figures: medians, the earliest difference, ratios between the right arms."""

import json

import pytest

from foredraft.measure import results

from .scripted import made_up_run


def summarise(rounds, plain, method="ngram", engine="foredraft", prompt="code", temperature=0.0):
    return results.summarise(
        rounds, plain, num_speculative_tokens=3, num_prompt_tokens=7,
        engine=engine, method=method, prompt=prompt, temperature=temperature,
    )  # fmt: skip


def test_figures_of_three_rounds_are_medians_and_the_split_is_of_one_of_them():
    rounds = [[made_up_run(range(12), total_s=s, first_s=s / 4, width=3)] for s in (2.0, 3.0, 6.0)]
    result = summarise(rounds, rounds)
    assert result.tokens_per_s == pytest.approx(12 / 3)
    assert result.decode_tokens_per_s == pytest.approx(8 / (3 * 0.75))  # the first delivery has four tokens
    assert result.split.target_s == pytest.approx(0.8 * 3.0)
    assert result.repeats == 3
    assert result.num_tokens == 12
    assert result.num_target_passes == 3
    assert result.tokens_per_target_pass == 4.0
    assert result.acceptance_rate == 1.0
    assert result.acceptance_len == 4.0
    assert result.acceptance_per_position == (1.0, 1.0, 1.0)
    assert result.first_difference is None
    assert (result.num_identical, result.num_runs) == (3, 3)


def test_prompts_of_a_workload_are_summed():
    rounds = [[made_up_run(range(10), total_s=1.0, first_s=0.5), made_up_run(range(30), total_s=3.0, first_s=0.5)]]
    result = summarise(rounds, rounds)
    assert result.num_tokens == 40
    assert result.tokens_per_s == pytest.approx(10.0)
    assert result.decode_tokens_per_s == pytest.approx(38 / 3)
    assert result.split.host_s == pytest.approx(0.04 * 4.0)
    assert result.acceptance_rate is None


def test_the_first_difference_is_the_earliest_of_all_rounds():
    plain = [[made_up_run([1, 2, 3, 4])], [made_up_run([5, 6, 7, 8])], [made_up_run([1, 1, 1, 1])]]
    rounds = [[made_up_run([1, 2, 3, 9])], [made_up_run([5, 0, 7, 8])]]
    result = summarise(rounds, plain)
    assert result.first_difference == 1
    assert (result.num_identical, result.num_runs) == (0, 2)


def test_ratios_compare_the_same_method_and_the_plain_arm():
    def result(engine, method, seconds, prompt="code"):
        rounds = [[made_up_run(range(12), total_s=seconds, first_s=0.0)]]
        return summarise(rounds, rounds, method, engine, prompt)

    found = results.ratios(
        [
            result("foredraft", "none", 2.0),
            result("foredraft", "ngram", 1.0),
            result("transformers", "none", 6.0),
            result("transformers", "ngram", 4.0),
            result("foredraft", "ngram", 1.0, prompt="story"),
        ]
    )
    assert {(each.prompt, each.arm, each.base): each.tokens_per_s for each in found} == {
        ("code", ("foredraft", "none"), ("transformers", "none")): pytest.approx(3.0),
        ("code", ("foredraft", "ngram"), ("transformers", "ngram")): pytest.approx(4.0),
        ("code", ("foredraft", "ngram"), ("foredraft", "none")): pytest.approx(2.0),
        ("code", ("transformers", "ngram"), ("transformers", "none")): pytest.approx(1.5),
    }
    assert results.ratio_documents(found)[0]["base"] == "transformers none"


def test_an_arm_s_document_is_plain_data():
    rounds = [[made_up_run(range(12), width=3)]]
    document = json.loads(json.dumps(results.arm_document(summarise(rounds, rounds))))
    assert document["first_difference"] is None
    assert document["time_s"] == {"draft": 0.2, "target": 1.6, "verify": 0.12, "host": 0.08}
    assert sum(document["time_s"].values()) == pytest.approx(2.0)
