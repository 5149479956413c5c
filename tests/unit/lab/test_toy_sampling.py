"""The stream samplers equal a plain draw-by-draw program, and print the seed document's figures."""

import numpy as np
import pytest

from foredraft.lab.acceptance import acceptance_by_context, count_acceptance
from foredraft.lab.distribution import replay_seed
from foredraft.lab.toy import seed_language
from foredraft.lab.toy_sampling import UniformStream, count_plain, count_rounds, count_speculative

LANGUAGE = seed_language()

# sampler, TV, chi-square p as the seed document prints them
SEED_FIGURES = {
    1_000: [("0.1631", "0.0564"), ("0.1630", "0.6063"), ("0.2099", "0.0000")],
    10_000: [("0.0545", "0.0546"), ("0.0524", "0.0995"), ("0.1199", "0.0000")],
    100_000: [("0.0160", "0.4631"), ("0.0184", "0.0096"), ("0.1062", "0.0000")],
    400_000: [("0.0084", "0.0232"), ("0.0078", "0.4405"), ("0.1075", "0.0000")],
}


@pytest.mark.parametrize(
    "num_samples",
    [
        1_000,
        10_000,
        pytest.param(100_000, marks=pytest.mark.slow),
        pytest.param(400_000, marks=pytest.mark.slow),
    ],
)
def test_seed_figures_to_the_digit(num_samples):
    rows = replay_seed(LANGUAGE, num_samples)
    assert [row.sampler for row in rows] == ["target only", "speculative", "wrong fallback"]
    printed = [(f"{row.total_variation:.4f}", f"{row.chi_square_p:.4f}") for row in rows]
    assert printed == SEED_FIGURES[num_samples]


def test_seed_acceptance_table_to_the_digit():
    printed = [
        f"{row.num_draft_tokens} {row.acceptance_rate:.3f} {row.tokens_per_target_pass:.3f} {row.formula_tokens:.3f}"
        for row in count_acceptance(LANGUAGE)
    ]
    assert printed == [
        "1 0.785 1.785 1.785",
        "2 0.782 2.396 2.393",
        "3 0.784 2.887 2.878",
        "4 0.781 3.254 3.242",
        "6 0.781 3.782 3.760",
        "8 0.780 4.067 4.054",
    ]


def test_acceptance_by_context():
    """Rejection as the document prints it; its text has 0.39 to 0.55 for match, unlike its sum of p q."""
    rows = acceptance_by_context(LANGUAGE)
    assert [f"{row.rejection:.3f}" for row in rows] == ["0.672", "0.692", "0.856", "0.863"]
    assert [f"{row.match:.3f}" for row in rows] == ["0.245", "0.270", "0.321", "0.316"]
    assert all(row.match < row.coupled_at_least <= row.coupled <= row.rejection for row in rows)


class DrawByDraw:
    """The obvious program: one uniform after another, one token after another."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def token(self, weights) -> int:
        return int(np.searchsorted(np.cumsum(weights), self.rng.random() * weights.sum(), side="right"))

    def round(self, last: int, num_draft_tokens: int, wrong: bool) -> list[int]:
        drafted = [last]
        for _ in range(num_draft_tokens):
            drafted.append(self.token(LANGUAGE.draft_probs[drafted[-1]]))
        for i in range(num_draft_tokens):
            target, draft = LANGUAGE.target_probs[drafted[i]], LANGUAGE.draft_probs[drafted[i]]
            token = drafted[i + 1]
            if self.rng.random() >= min(1.0, target[token] / draft[token]):
                residual = target if wrong else np.maximum(target - draft, 0.0)
                return [*drafted[1 : i + 1], self.token(residual)]
        return [*drafted[1:], self.token(LANGUAGE.target_probs[drafted[-1]])]

    def count(self, num_samples: int, num_draft_tokens: int, wrong: bool):
        counts = np.zeros(256, dtype=int)
        for _ in range(num_samples):
            tokens = [0]
            while len(tokens) < 5:
                tokens += self.round(tokens[-1], num_draft_tokens, wrong)
            counts[int("".join(map(str, tokens[1:5])), 4)] += 1
        return counts


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3, 6])
def test_counts_and_use_of_the_generator_equal_the_draw_by_draw_program(num_draft_tokens, wrong):
    plain, stream = DrawByDraw(7), UniformStream(np.random.default_rng(7))
    expected = plain.count(600, num_draft_tokens, wrong)
    counts = count_speculative(LANGUAGE, stream, 600, num_draft_tokens, wrong=wrong)
    assert counts.tolist() == expected.tolist()
    assert stream.peek(1)[0] == plain.rng.random()


def test_blocks_join_without_a_seam(monkeypatch):
    """With blocks of 16 uniforms nearly every block ends inside a sequence."""
    monkeypatch.setattr("foredraft.lab.toy_sampling._BLOCK_LEN", 16)
    stream = UniformStream(np.random.default_rng(7))
    assert count_speculative(LANGUAGE, stream, 600, 3).tolist() == DrawByDraw(7).count(600, 3, False).tolist()


def test_rounds_follow_each_other_as_in_the_draw_by_draw_program(monkeypatch):
    monkeypatch.setattr("foredraft.lab.toy_sampling._BLOCK_LEN", 64)
    program, last, accepted, emitted = DrawByDraw(3), 0, 0, 0
    for _ in range(500):
        new = program.round(last, 4, wrong=False)
        last, emitted, accepted = new[-1], emitted + len(new), accepted + len(new) - 1
    counted = count_rounds(LANGUAGE, UniformStream(np.random.default_rng(3)), 500, 4)
    assert (counted.num_emitted_tokens, counted.num_accepted_tokens) == (emitted, accepted)
    assert 0 < counted.num_accepted_tokens < counted.num_judged_tokens < 4 * 500


def test_plain_sampling_takes_one_uniform_a_token():
    stream, program = UniformStream(np.random.default_rng(1)), DrawByDraw(1)
    counts = count_plain(LANGUAGE, stream, 300)
    assert counts.tolist() == program.count(300, 0, False).tolist()
    assert stream.peek(1)[0] == np.random.default_rng(1).random(1201)[-1]
