"""Both tables of the seed document to the digit."""

import pytest

from foredraft.lab.speedups import SEED_ACCEPTANCE_RATES, SEED_DRAFT_LENS, speedup_row

TABLES = {
    0.05: """
0.5      1.43   1.59   1.63   1.61   1.57   1.53   1.43   3 (1.63x)
0.6      1.52   1.78   1.89   1.92   1.91   1.87   1.77   4 (1.92x)
0.7      1.62   1.99   2.20   2.31   2.35   2.35   2.28   6 (2.35x)
0.8      1.71   2.22   2.57   2.80   2.95   3.04   3.09   8 (3.09x)
0.9      1.81   2.46   2.99   3.41   3.75   4.01   4.38   13 (4.67x)
""",
    0.2: """
0.5      1.25   1.25   1.17   1.08   0.98   0.90   0.77   1 (1.25x)
0.6      1.33   1.40   1.36   1.28   1.19   1.10   0.95   2 (1.40x)
0.7      1.42   1.56   1.58   1.54   1.47   1.39   1.23   3 (1.58x)
0.8      1.50   1.74   1.85   1.87   1.84   1.80   1.66   4 (1.87x)
0.9      1.58   1.94   2.15   2.28   2.34   2.37   2.36   7 (2.37x)
""",
}


@pytest.mark.parametrize("draft_cost", TABLES)
def test_seed_table(draft_cost):
    printed = []
    for rate in SEED_ACCEPTANCE_RATES:
        row = speedup_row(rate, draft_cost, SEED_DRAFT_LENS, limit=20)
        cells = [f"{rate}", *(f"{value:.2f}" for value in row.speedups.values())]
        printed.append([*cells, str(row.best_num_draft_tokens), f"({row.best_speedup:.2f}x)"])
    assert printed == [line.split() for line in TABLES[draft_cost].strip().splitlines()]


def test_row_of_a_free_draft():
    row = speedup_row(0.8, 0.0, [0, 4], limit=6)
    assert row.best_num_draft_tokens == 6
    assert row.continuous_best == float("inf")
    assert row.speedups[0] == 1.0
    assert row.saturation == pytest.approx(5.0)
