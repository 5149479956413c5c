"""The options of a training run: frozen, checked, and written beside its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.errors import InvalidOptionError
from foredraft.train.methods import TRAINABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """How a head is trained. Two runs with the same options on the same texts give the same weights.

    Attributes:
        method: one of ``methods.TRAINABLE``.
        seed: of weights, order and noise.
        num_steps: how far a head that reads its own states is unrolled in the end; see ``schedule.num_steps_at``.
        num_heads: of methods with a head for each place.
        tie_weights: one embedding, norm and head for all steps of an MLP speculator.
        num_layers: of a draft model, parallel or not, and of a dflash head.
        num_places: tokens that a parallel drafter (pard, dflash) says in one pass.
        num_rows: tokens of an update, padding included.
        window: most tokens of a text that are read together.
        learning_rate, head_learning_rate: of the body, and of the projection to the vocabulary.
        warm_up: share of the updates over which the learning rate rises.
        weight_decay: of matrices.
        noise: standard deviation of what is added to each state that is read, which has deviation 1.
        dropout: share of the numbers of the first state that are left out.
        step_decay: each further step or head counts by this less.
        draft_vocab_size: ids that can be drafted, or, of methods that draft any, whose laws are learnt; None chooses.
        held_out: share of the texts that acceptance is measured on.
    """

    method: str
    seed: int = 0
    num_steps: int = 3
    num_heads: int = 4
    tie_weights: bool = True
    num_layers: int = 3
    num_places: int = 7
    num_rows: int = 576
    window: int = 512
    learning_rate: float = 1e-3
    head_learning_rate: float = 3e-4
    warm_up: float = 0.03
    weight_decay: float = 0.01
    noise: float = 0.1
    dropout: float = 0.0
    step_decay: float = 0.8
    draft_vocab_size: int | None = None
    held_out: float = 0.04

    def __post_init__(self) -> None:
        if self.method not in TRAINABLE:
            raise InvalidOptionError(f"method {self.method!r} cannot be trained; one of {', '.join(TRAINABLE)} can")
        for name, low, high in (
            ("num_steps", 1, 16),
            ("num_heads", 1, 16),
            ("num_layers", 1, 1000),
            ("num_places", 1, 64),
            ("num_rows", 1, 1_000_000),
            ("window", 8, 1_000_000),
            ("learning_rate", 0.0, 1.0),
            ("head_learning_rate", 0.0, 1.0),
            ("warm_up", 0.0, 1.0),
            ("weight_decay", 0.0, 1.0),
            ("noise", 0.0, 10.0),
            ("dropout", 0.0, 0.9),
            ("step_decay", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidOptionError(f"{name}={value} is outside [{low}, {high}]")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 2:
            raise InvalidOptionError(f"draft_vocab_size={self.draft_vocab_size} is below 2")
