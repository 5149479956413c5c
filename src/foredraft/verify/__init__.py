"""Acceptance rules: pure functions from probabilities and noise to what is accepted and emitted.

| module      | rule                                            | output               |
|-------------|-------------------------------------------------|----------------------|
| `rejection` | accept with min(1, target / draft)              | distribution-exact   |
| `block`     | accept the longest prefix that a block test passes | distribution-exact |
| `match`     | accept while the target's own token is drafted  | greedy and coupled: token-identical |
| `tree`      | the walk down a tree: by equality, or by rejection against what is left of the target | as on chains |
| `typical`   | accept what is likely enough                    | lossy                |

Use the modules by name (`rejection.accept_probs`, `block.stop_probs`): functions of different rules share
names and must not be mixed.
"""

from foredraft.verify import block, match, rejection, tree, typical

__all__ = ["block", "match", "rejection", "tree", "typical"]
