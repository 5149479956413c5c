"""For tests of drafters and engines: tiny models that are exactly known, scripted drafters, the conformance suite.

from foredraft.testing import check_drafter

check_drafter(lambda target, draft_model: MyDrafter())
"""

from foredraft.testing.conformance import (
    LOSSLESS_RULES,
    MODES,
    MakeDrafter,
    Models,
    Totals,
    check_drafter,
    check_interface,
    check_tokens,
    makes_trees,
)
from foredraft.testing.distribution import check_distribution
from foredraft.testing.drafters import OracleDrafter, RecordingDrafter, ScriptedDrafter
from foredraft.testing.engines import check_cache, check_caches, engine_for, run
from foredraft.testing.heads import (
    check_chains,
    draft_logits,
    draft_tokens,
    eagle3_config,
    eagle3_head,
    hidden_states,
    train_head,
    trained_eagle3,
    trained_medusa,
    unrolled,
)
from foredraft.testing.models import (
    bigram_model,
    constant_bigram,
    noisy_copy,
    random_model,
    scripted_model,
    target_for,
    tiny_config,
    tiny_mamba,
    tiny_model,
)
from foredraft.testing.parallel_heads import dflash_config, dflash_head, trained_dflash, trained_pard
from foredraft.testing.reference import Reference, last_logits, reference
from foredraft.testing.state_heads import eagle_head, mlp_speculator, mtp_head
from foredraft.testing.texts import tiny_texts

__all__ = [
    "LOSSLESS_RULES",
    "MODES",
    "MakeDrafter",
    "Models",
    "OracleDrafter",
    "RecordingDrafter",
    "Reference",
    "ScriptedDrafter",
    "Totals",
    "bigram_model",
    "check_cache",
    "check_caches",
    "check_chains",
    "check_distribution",
    "check_drafter",
    "check_interface",
    "check_tokens",
    "constant_bigram",
    "dflash_config",
    "dflash_head",
    "draft_logits",
    "draft_tokens",
    "eagle3_config",
    "eagle3_head",
    "eagle_head",
    "engine_for",
    "hidden_states",
    "last_logits",
    "makes_trees",
    "mlp_speculator",
    "mtp_head",
    "noisy_copy",
    "random_model",
    "reference",
    "run",
    "scripted_model",
    "target_for",
    "tiny_config",
    "tiny_mamba",
    "tiny_model",
    "tiny_texts",
    "train_head",
    "trained_dflash",
    "trained_eagle3",
    "trained_medusa",
    "trained_pard",
    "unrolled",
]
