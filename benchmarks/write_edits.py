"""Requests to edit functions of Python's standard library, as JSONL, for a head that will meet code edits.

    python benchmarks/write_edits.py edits.jsonl [--repeats 700]
    python benchmarks/write_texts.py edits --data edits.jsonl

Which functions there are depends on the Python that runs this. They lose docstrings, comments and the form they were
written in.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from foredraft.train import openings

EDITS = (
    "Add type hints and a docstring to this function.",
    "Add type hints to this function.",
    "Add a docstring to this function.",
    "Add type hints.",
    "Write a docstring for this function.",
    "Add comments to this function.",
    "Add error handling to this function.",
    "Rename the variables of this function.",
    "Refactor this function.",
    "Explain this function.",
    "Fix the bugs in this function.",
    "Simplify this function.",
    "Make this function faster.",
    "Convert this function to use a list comprehension.",
)
FORMS = ("Return the full function.", "Return all of the code.", "Return only the code.", "", "")
LEFT_OUT = ("site-packages", "/test", "lib2to3", "idlelib")
LINES, LONGEST = range(5, 23), 900


def functions() -> Iterator[str]:
    """Functions at the top of a module, of some lines."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in (*library.glob("*.py"), *library.glob("[a-z]*/*.py")):
        if any(part in str(file) for part in LEFT_OUT):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                if ast.get_docstring(node) is not None:
                    del node.body[0]
                code = ast.unparse(node) if node.body else ""
                if code.count("\n") in LINES and len(code) < LONGEST:
                    yield code


def main(options: argparse.Namespace) -> None:
    codes, draws = sorted(set(functions())), random.Random(options.seed)
    draws.shuffle(codes)
    with options.file.open("w", encoding="utf-8") as file:
        for code in [*codes, *codes[: options.repeats]]:
            edit = draws.choice(EDITS if draws.random() < 0.75 else openings.EDITS)
            request = f"{edit} {draws.choice(FORMS)}".rstrip() + f"\n\n{code}\n"
            chat = {"category": "code", "messages": [{"role": "user", "content": request}]}
            file.write(json.dumps(chat) + "\n")
    print(f"{options.file}: {len(codes)} functions, {len(codes) + min(options.repeats, len(codes))} requests")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--repeats", type=int, default=700, help="functions that are asked about twice")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
