"""PARD (An et al., 2504.18583): a language model that was taught to fill in masks, so that one pass drafts all tokens.

Drafting. Behind the text stand k - 1 masks, and each place says what comes next::

    text  c0 .. c(n-1)  M   M          the model is causal and an ordinary one
    says            d1  d2  d3

Training. Places of the text are repeated once a depth. The row of depth d at place i stands for d - 1 masks and one
more behind the text that ends with token i - d; it predicts token i + 1::

    depth 0   token i          attends to tokens 0 .. i
    depth d   mask             attends to tokens 0 .. i - d and to the rows of depths 1 .. d at places i - d + 1 .. i

    rows = parallel_rows(labels, mask_token_id, num_tokens)
    out = model(input_ids=rows.input_ids(token_ids), position_ids=rows.positions, attention_mask=rows.attention_mask)
    loss = cross_entropy(out.logits.flatten(0, 1), rows.labels.flatten())

Masks stand where they reach a token that is to be learnt. Deeper rows are dropped at random, down to r^d of the text,
together with those that would build on them (conditional drop of tokens), so a batch is about 1 / (1 - r) times the
text, not k times.

Published checkpoints are folders of causal models whose config.json has ``pard_token``; vLLM runs them as method
``draft_model`` with ``parallel_drafting``, and reads ``ptd_token_id`` as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ModelLoadError

IGNORED = -100
"""A label that is not to be learnt; the one of torch's cross entropy."""
MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")


@dataclass(frozen=True, slots=True)
class ParallelRows:
    """What the model is fed for a batch of texts ``[B, S]``, N rows each.

    Attributes:
        places: of each row in the text, ``[N]``; depths: masks up to and with it, ``[N]``.
        labels: token behind each row, ``[B, N]``, or -100.
        attention_mask: added to the scores, ``[1, 1, N, N]``.
    """

    mask_token_id: int
    places: Tensor
    depths: Tensor
    labels: Tensor
    attention_mask: Tensor

    @property
    def positions(self) -> Tensor:
        """Position ids ``[B, N]``."""
        return self.places.expand(len(self.labels), -1)

    def input_ids(self, token_ids: Tensor) -> Tensor:
        """The tokens ``[B, N]`` of rows over texts ``[B, S]``."""
        return token_ids[:, self.places].masked_fill(self.depths > 0, self.mask_token_id)


def parallel_rows(
    labels: Tensor,
    mask_token_id: int,
    num_tokens: int,
    *,
    keep: float = 0.7,
    keep_at_least: float = 0.2,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> ParallelRows:
    """The rows of a batch; which ones are kept is the same for all of its texts.

    Args:
        labels: the texts, ``[B, S]``, -100 where a token is not to be learnt (prompts, padding on the right).
        num_tokens: how far the model learns to look ahead, one of them without a mask.
        keep: rows of a depth that are kept, as a share of those of the depth before; 1 keeps all.
        keep_at_least: share of the places with masks that is kept at any depth.
        dtype: of the attention mask.
    """
    length, device = labels.shape[1], labels.device
    kept = [torch.arange(length - 1)]
    learnt = (labels != IGNORED).any(0).nonzero()
    first = max(0, int(learnt[0]) - num_tokens) if len(learnt) else length  # from here on masks reach a label
    for depth in range(1, num_tokens):
        possible = kept[-1][(kept[-1] < length - 2) & (kept[-1] >= first + depth - 1)] + 1
        count = min(len(possible), int((length - first) * max(keep**depth, keep_at_least)))
        chosen = torch.randperm(len(possible), generator=generator)[:count]
        kept.append(possible[chosen].sort().values)
    places = torch.cat(kept).to(device)
    counts = torch.tensor([len(part) for part in kept], device=device)
    depths = torch.arange(num_tokens, device=device).repeat_interleave(counts)
    starts = places - depths  # the last token of the text that a row builds on
    text = (depths == 0) & (places <= starts[:, None])
    own = (depths > 0) & (depths <= depths[:, None]) & (starts == starts[:, None])
    mask = torch.zeros(len(places), len(places), dtype=dtype, device=device)
    mask.masked_fill_(~(text | own), torch.finfo(dtype).min)
    return ParallelRows(mask_token_id, places, depths, labels[:, places + 1], mask[None, None])


def mask_token_of(config: Any, path: Path | str, vocab_size: int) -> int:
    """The id of the mask in the configuration of a model.

    Raises:
        ModelLoadError: there is none, or it is no token of the model.
    """
    found = next(((key, value) for key in MASK_KEYS if (value := getattr(config, key, None)) is not None), None)
    if found is None:
        raise ModelLoadError(
            f"{path} is no parallel draft model: its config.json has no pard_token, the id of the mask token; for an "
            "ordinary draft model use method 'draft_model'"
        )
    key, token = found
    if not isinstance(token, int) or not 0 <= token < vocab_size:
        raise ModelLoadError(f"{key} {token!r} of {path} is no token of its vocabulary of {vocab_size}")
    return token


def save_pard(model: Any, path: Path, mask_token_id: int, num_tokens: int, tokenizer: Any = None) -> None:
    """Write a model as AMD publishes them: an ordinary folder with the id of the mask.

    Args:
        num_tokens: how far it was trained to look ahead, the training option ``para_num``; nothing beyond is drafted.
        tokenizer: of the target; without one only the sizes of the vocabularies can be compared.
    """
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    file = path / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content |= {"pard_token": mask_token_id, "spd_type": "pard", "para_num": num_tokens}
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
