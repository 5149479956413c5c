"""Where draft tokens come from: one file a method, one line in the registry."""

from foredraft.drafters.base import Drafter, DraftRow, JudgedDraft
from foredraft.drafters.registry import DRAFTERS, make_drafter

__all__ = ["DRAFTERS", "DraftRow", "Drafter", "JudgedDraft", "make_drafter"]
