"""The speculators package runs the heads that we write as we do.

FOREDRAFT_SPECULATORS_PYTHON names the Python of an environment with it (benchmarks/peers/README.md).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.heads.eagle3_format import save_eagle3
from foredraft.testing import eagle3_config, eagle3_head, tiny_model

FORWARD = Path(__file__).parents[2] / "benchmarks" / "peers" / "speculators_forward.py"
PYTHON = os.environ.get("FOREDRAFT_SPECULATORS_PYTHON", "")
NUM_STEPS = 3

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="FOREDRAFT_SPECULATORS_PYTHON unset")]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        {"draft_vocab_size": 64},
    ],
    ids=lambda changes: "+".join(changes) or "plain",
)
def test_same_drafts(tmp_path: Path, changes: dict[str, Any]):
    """float32, teacher forcing: every step's best token at every place of a text."""
    model = tiny_model()
    head = eagle3_head(eagle3_config(model, **changes))
    config = model.config
    model.save_pretrained(tmp_path / "target")
    save_eagle3(
        head, tmp_path / "head", {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]}
    )
    torch.manual_seed(1)
    text = torch.randint(config.vocab_size, (1, 129))  # flex attention on a CPU wants blocks of 128
    features = torch.randn(1, 129, 3 * config.hidden_size)
    embeddings = model.get_input_embeddings().weight.detach()
    held = {"features": features[:, :-1], "token_ids": text[:, 1:], "embeddings": embeddings}
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, tmp_path / "inputs.safetensors")
    command = [PYTHON, str(FORWARD), str(tmp_path / "head"), str(tmp_path / "inputs.safetensors")]
    done = subprocess.run(
        [*command, str(tmp_path / "outputs.safetensors"), str(NUM_STEPS)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(tmp_path / "outputs.safetensors")["drafts"]
    with torch.no_grad():
        ours = [logits[0].argmax(-1) for logits in head.unroll(features, text, embeddings, NUM_STEPS)]
    for step, drafts in enumerate(ours):
        known = len(drafts) - step  # behind it there is no token of the text to go on from
        assert len(drafts[:known].unique()) > 5
        assert drafts[:known].tolist() == theirs[step, :known].tolist()
