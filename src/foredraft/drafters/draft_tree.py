"""A smaller language model drafts a tree, level by level.

Each level is one pass of the draft model over the nodes that lead to its frontier.
"""

from __future__ import annotations

from torch import Tensor

from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.growing import Tree, TreeDrafter
from foredraft.errors import IncompatibleDrafterError
from foredraft.target.forward import TargetModel
from foredraft.target.kinds import describe
from foredraft.target.layout import PassRow


class DraftTreeDrafter(TreeDrafter, DraftModelDrafter):
    """Drafts trees with a second model of the same vocabulary.

    Args:
        width: children of a node.
        depth: levels, each a pass of the draft model.
        beam: nodes of a level that get children; None: as many as ``width``.

    Raises:
        IncompatibleDrafterError: the draft model can be fed chains only.
    """

    def __init__(self, model: TargetModel, vocab_size: int, width: int, depth: int, beam: int | None = None):
        if not model.supports_trees:
            raise IncompatibleDrafterError(
                f"{describe(model.model)} keeps a state that cannot branch, so it cannot draft trees; use tree_width=1"
            )
        super().__init__(model, vocab_size)
        self.width, self.depth, self.beam, self.max_passes = width, depth, beam, depth

    def _frontier_logits(self, trees: list[Tree]) -> Tensor:
        """Feed each row's new text and the nodes down to its frontier; the text is committed, the nodes are not."""
        passes = []
        for tree in trees:
            nodes = sorted({i for node in tree.frontier for i in tree.path(node)})
            text = tree.row.token_ids[len(self._fed[tree.row.sequence_id]) :]
            parents = [nodes.index(tree.parents[i]) if tree.parents[i] >= 0 else -1 for i in nodes]
            tokens = text + [tree.token_ids[i] for i in nodes]
            passes.append(PassRow(tree.row.sequence_id, tokens, len(tree.frontier), parents))
        logits = self.model.forward(passes)
        for tree in trees:
            fed = self._fed[tree.row.sequence_id]
            text = tree.row.token_ids[len(fed) :]
            self.model.slots.commit(tree.row.sequence_id, len(text))
            fed += text
        return self._fit(logits)
