"""Code edits and stories in one batch: do code edits get long drafts while stories get none, and is that worth it?

    python benchmarks/mixed_routes.py [MODEL] [--concurrency 8] [--repeats 7]

Single draft lengths for everybody, plain, and auto, arms in turn over the same requests (as ``foredraft bench
--concurrency``). The last line is one JSON document; ``holds`` says whether auto's throughput is above the best single
length's, and stories are drafted for less than a fifth as far as code edits.
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console

from foredraft.measure.load_bench import result_document, run_load_bench
from foredraft.measure.load_options import AUTO, LoadOptions
from foredraft.measure.load_tables import detail_grid, latency_grid, load_headline
from foredraft.measure.machine import cpu
from foredraft.measure.tables import Grid, Section, rich_table

CODE, STORY = "code", "story"


def main(options: argparse.Namespace) -> None:
    wanted = LoadOptions(
        model=options.model,
        method=options.method,
        concurrency=(options.concurrency,),
        routes=(CODE, STORY),
        draft_lens=(1, 2, 3, 5, 7),
        num_requests=2 * options.concurrency,
        max_tokens=options.max_tokens,
        repeats=options.repeats,
        time_limit_s=options.time_limit,
        threads=options.threads,
    )
    result = run_load_bench(wanted, lambda label, fraction: print(f"{fraction:4.0%} {label}", file=sys.stderr))
    arms = {each.arm: each for each in result.results}
    best = next(each for each in result.results if each.is_best)
    auto = arms[AUTO]
    rows = [
        [
            name,
            f"{each.tokens_per_s:.0f}",
            f"{each.against_plain:.2f} x",
            f"{each.against_best:.2f} x",
            *(f"{each.mean_draft_len_by_route[route]:.2f}" for route in (CODE, STORY)),
        ]
        for name, each in arms.items()
    ]
    console = Console(highlight=False, width=110)
    console.print(load_headline(result, cpu()["cpu"]), end="\n\n")
    columns = ["", "tok/s", "against plain", "against best", f"drafted: {CODE}", STORY]
    caption = "drafted: draft tokens chosen for a row of a step. Ratios within a round, medians."
    console.print(rich_table(Grid("One batch, two routes", columns, 1, caption, [Section("", rows)])))
    console.print(rich_table(detail_grid(result)), rich_table(latency_grid(result)))
    drafted = auto.mean_draft_len_by_route
    print(
        json.dumps(
            {
                "model": options.model,
                "method": options.method,
                "concurrency": options.concurrency,
                "rounds": auto.num_rounds,
                "best_single": best.arm,
                "auto_against_best": round(auto.against_best, 3),
                "auto_against_plain": round(auto.against_plain, 3),
                "auto_draft_len": {route: round(length, 3) for route, length in drafted.items()},
                "holds": auto.against_best > 1.0 and drafted[STORY] < 0.2 * drafted[CODE],
                "arms": [result_document(each) for each in result.results],
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--time-limit", type=float, default=540.0)
    parser.add_argument("--threads", type=int)
    main(parser.parse_args())
