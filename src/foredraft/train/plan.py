"""What a run will do, fixed once it is known and written down, so that a run that goes on is the same run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidOptionError
from foredraft.train.options import TrainOptions

FILE = "plan.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Of a training run.

    Attributes:
        fingerprint: of the target.
        texts: folders of the stores.
        num_pieces: of the first one, to be made; None until the first has shown how long one takes.
        num_texts: of the stores that are used; None until all are there.
        num_updates: None until their speed has been measured.
        num_looked: texts that acceptance is measured on during the run; None takes the usual number.
        start_from: folder of an earlier run whose weights this one begins with.
        dtype: of the products.
    """

    options: dict[str, Any]
    fingerprint: str
    texts: list[str]
    dtype: str
    num_pieces: int | None = None
    num_texts: int | None = None
    num_updates: int | None = None
    num_looked: int | None = None
    start_from: str | None = None


def write_plan(folder: Path, plan: Plan) -> Plan:
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / (FILE + ".part")
    unfinished.write_text(json.dumps(asdict(plan), indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, folder / FILE)
    return plan


def read_plan(folder: Path) -> Plan | None:
    """The plan of a folder; None if no run has begun there.

    Raises:
        InvalidOptionError: it cannot be read.
    """
    file = folder / FILE
    if not file.exists():
        return None
    try:
        return Plan(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InvalidOptionError(f"{file} is no plan of a training run ({error}); take another --out") from error


def check_same_run(folder: Path, plan: Plan, options: TrainOptions, fingerprint: str) -> None:
    """Raises InvalidOptionError if the run that was begun in a folder is another one. Options that its plan does not
    name have their defaults."""
    for field in fields(TrainOptions):
        there, here = plan.options.get(field.name, field.default), getattr(options, field.name)
        if there != here:
            raise InvalidOptionError(
                f"{folder} holds a run with {field.name}={there!r}, and {field.name}={here!r} is asked for; ask for "
                "the same to go on with it, or take another --out"
            )
    if plan.fingerprint != fingerprint:
        raise InvalidOptionError(f"{folder} holds a run for a target with other weights; take another --out")
