"""The methods that can be trained: a line each, with the module that knows how. No torch.

A module has ``feature_layers(num_layers)``, the layers of the target whose states are wanted, and
``make(target, texts, options)``, which gives a :class:`~foredraft.train.trainee.Trainee`. Where not every target will
do it has ``check_target(target)`` too, which is asked before texts are written.
"""

from __future__ import annotations

TRAINABLE = {
    "eagle3": "foredraft.train.eagle3",
    "eagle": "foredraft.train.eagle",
    "mtp": "foredraft.train.mtp",
    "mlp": "foredraft.train.mlp",
    "medusa": "foredraft.train.medusa",
    "draft": "foredraft.train.draft",
    "pard": "foredraft.train.pard",
    "dflash": "foredraft.train.dflash",
}
