"""What is needed to go on behind a kill: weights, the optimizer's state, and the number of updates done.

Order of the texts, noise and learning rate follow from the seed and that number, so there is no more.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import InvalidOptionError

FILE = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A point of a run.

    Attributes:
        num_done: updates.
        losses: of the updates since the last look at held-out texts.
        history: what was measured so far, a mapping a look.
    """

    num_done: int
    module: dict[str, Tensor]
    optimizer: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Replace the last one, at once or not at all."""
    unfinished = folder / (FILE + ".part")
    with unfinished.open("wb") as stream:
        content = {name: getattr(checkpoint, name) for name in Checkpoint.__slots__}
        torch.save(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(unfinished, folder / FILE)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The last one, on the CPU; None if there is none.

    Raises:
        InvalidOptionError: it cannot be read.
    """
    file = folder / FILE
    if not file.exists():
        return None
    try:
        return Checkpoint(**torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # damaged pickles raise many kinds
        raise InvalidOptionError(
            f"{file} is no checkpoint of a training run ({error}); remove it to begin anew"
        ) from error
