"""Where draft tokens come from: one file a method, one line in `foredraft.methods`."""

from foredraft.drafters.base import Drafter, DraftRow, JudgedDraft, Offer, chain_draft, tree_draft
from foredraft.drafters.registry import make_drafter
from foredraft.types import Draft

__all__ = ["Draft", "DraftRow", "Drafter", "JudgedDraft", "Offer", "chain_draft", "make_drafter", "tree_draft"]
