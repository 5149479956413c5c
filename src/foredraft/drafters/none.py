"""Plain decoding: no draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft.config import SpeculativeConfig
from foredraft.drafters.base import Drafter, DraftRow, chain_draft
from foredraft.types import Draft


class NoDrafter(Drafter):
    """Proposes nothing, so every pass emits the target's next token."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return chain_draft([[] for _ in rows])


def build(speculative: SpeculativeConfig, *_: Any) -> Drafter:
    return NoDrafter()
