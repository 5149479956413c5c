"""An EAGLE-3 head as the speculators package runs it; to be started with that environment's Python.

    PYTHON speculators_forward.py HEAD INPUTS OUTPUTS NUM_STEPS

INPUTS is a safetensors file with ``features [1, S, layers * hidden]`` of a text, the ``token_ids [1, S]`` behind each
of its places, and the target's ``embeddings [V, hidden]``. OUTPUTS gets ``drafts [steps, S]``, ids of the draft
vocabulary; tokens are those of the text at every step (teacher forcing).
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel


def main(head: str, inputs: str, outputs: str, num_steps: str) -> None:
    held = load_file(inputs)
    model = SpeculatorModel.from_pretrained(head).float().eval()
    # 0.9.0 takes the target's embeddings only if the memory that it got for them happens to hold a NaN.
    model.embed_tokens.weight.data = held["embeddings"]
    with torch.no_grad():
        drafts = model(
            hidden_states=held["features"],
            input_ids=held["token_ids"],
            document_ids=torch.zeros_like(held["token_ids"]),
            ttt_steps=int(num_steps),
        )
    save_file({"drafts": torch.cat(drafts)}, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
