"""The MLP speculator (Wertheimer et al., 2404.19124): a small recurrence from one state of the target, no attention.

    s = state that the target's lm_head reads;  with ``scale_input``: s = norm(s) / sqrt(2)
    step i, from the token c before:
        s = GELU(ln_i(proj_i(s) + emb_i(c) * emb_weight / state_weight));  logits = head_i(s)
        state_weight = 0.5^(1 / (2 n)),  emb_weight = sqrt((1 - state_weight^2) * inner / 2)

for n steps at most; a norm is RMSNorm with eps 1e-6, ``ln_i`` with a weight and a bias. With ``tie_weights`` all steps
have the same tensors, but for ``proj_0``. Step 0 reads the token that the state itself gave, so step i says what stands
i + 2 places behind the state.

Training. ``unroll(features, token_ids, None, num_steps)`` yields the logits of each step, with the tokens of the text:

    features [B, S, hidden], token_ids [B, S] -> [B, S - 1, V]      step j, row i: for token i + 2 + j

Read and written is IBM's layout, which vLLM has a module for: ``speculator.{emb,proj,head,ln}.{i}``, without
``speculator.`` too. Files of tied heads have each tensor once or for every i; written is every i.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from foredraft.errors import IncompatibleDrafterError, ModelLoadError
from foredraft.heads.checkpoint import HeadFiles, fill, state_layer
from foredraft.target.features import AFTER_NORM

EPS = 1e-6
_PART = re.compile(r"(emb|proj|head|ln)\.(\d+)\.(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """Shapes and variants of a speculator.

    Attributes:
        hidden_size: of the target (``emb_dim`` in files); inner_size: of its own states (``inner_dim``).
        num_steps: most tokens of a draft (``n_predict``).
        feature_layers: the one whose state it reads.
    """

    hidden_size: int
    inner_size: int
    vocab_size: int
    num_steps: int
    tie_weights: bool = False
    scale_input: bool = False
    feature_layers: tuple[int, ...] = (AFTER_NORM,)


class ShiftedNorm(nn.Module):
    """RMSNorm with a weight and a bias."""

    def __init__(self, size: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x, x.shape[-1:], eps=EPS) + self.bias


class MlpSpeculator(nn.Module):
    """The module; names of its tensors are IBM's, each tensor once."""

    def __init__(self, config: MlpConfig):
        super().__init__()
        self.config = config
        inner, vocab = config.inner_size, config.vocab_size
        num = 1 if config.tie_weights else config.num_steps
        num_proj = min(2, config.num_steps) if config.tie_weights else config.num_steps
        sizes = [config.hidden_size] + [inner] * (num_proj - 1)
        self.emb = nn.ModuleList(nn.Embedding(vocab, inner) for _ in range(num))
        self.proj = nn.ModuleList(nn.Linear(size, inner, bias=False) for size in sizes)
        self.head = nn.ModuleList(nn.Linear(inner, vocab, bias=False) for _ in range(num))
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(num))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, inner**-0.5)
        state_weight = 0.5 ** (0.5 / config.num_steps)
        self._token_weight = math.sqrt((1.0 - state_weight**2) * inner / 2) / state_weight

    def begin(self, features: Tensor) -> Tensor:
        """The state ``[..., hidden]`` that step 0 reads."""
        if not self.config.scale_input:
            return features
        return F.rms_norm(features, features.shape[-1:], eps=EPS) / math.sqrt(2.0)

    def step(self, state: Tensor, token_ids: Tensor, step: int) -> Tensor:
        """The state ``[..., inner]`` behind the next token; :meth:`logits` says what follows."""
        emb, proj, ln = (of_step(parts, step) for parts in (self.emb, self.proj, self.ln))
        out: Tensor = F.gelu(ln(proj(state) + emb(token_ids) * self._token_weight))
        return out

    def logits(self, state: Tensor, step: int) -> Tensor:
        out: Tensor = of_step(self.head, step)(state)
        return out

    def unroll(self, features: Tensor, token_ids: Tensor, embeddings: Any, num_steps: int) -> Iterator[Tensor]:
        """See the top of this file; ``embeddings`` are not read, it has its own."""
        states = self.unroll_states(features, token_ids, embeddings, num_steps)
        return (self.logits(state, step) for step, state in enumerate(states))

    def unroll_states(self, features: Tensor, token_ids: Tensor, embeddings: Any, num_steps: int) -> Iterator[Tensor]:
        """What :meth:`logits` reads at each step, ``[B, S - 1, inner]``."""
        state = self.begin(features[:, :-1])
        for step in range(num_steps):
            state = self.step(state, F.pad(token_ids[:, 1 + step :], (0, step)), step)
            yield state


def of_step(parts: nn.ModuleList, step: int) -> nn.Module:
    """The one of a list of parts that a step uses; tied ones are used by all that follow."""
    return parts[min(step, len(parts) - 1)]


def read_mlp(files: HeadFiles, hidden_size: int, vocab_size: int, num_layers: int) -> MlpSpeculator:
    """The speculator of a folder for a target of these sizes.

    Raises:
        ModelLoadError: the files hold no MLP speculator, or do not belong together.
        IncompatibleDrafterError: it was made for another target.
    """
    raw = files.config
    tensors = {name.removeprefix("speculator."): tensor for name, tensor in files.tensors.items()}
    if "emb.0.weight" not in tensors or "proj.0.weight" not in tensors or "n_predict" not in raw:
        raise ModelLoadError(
            f"{files.path} holds no MLP speculator: its config.json lacks n_predict, or it lacks "
            "speculator.emb.0.weight or speculator.proj.0.weight"
        )
    shapes = {"emb.0.weight": (0, vocab_size), "proj.0.weight": (1, hidden_size)}
    for name, (axis, wanted) in shapes.items():
        shape = list(tensors[name].shape)
        if shape[axis] != wanted:
            raise IncompatibleDrafterError(
                f"the speculator in {files.path} was made for another target: speculator.{name} has shape {shape} and "
                f"needs {[*shape[:axis], wanted, *shape[axis + 1 :]]}"
            )
    config = MlpConfig(
        hidden_size=hidden_size,
        inner_size=raw.get("inner_dim") or raw.get("emb_dim") or hidden_size,
        vocab_size=vocab_size,
        num_steps=raw["n_predict"],
        tie_weights=bool(raw.get("tie_weights", False)),
        scale_input=bool(raw.get("scale_input", False)),
        feature_layers=state_layer(raw, num_layers),
    )
    with torch.device("meta"):
        speculator = MlpSpeculator(config)
    if config.tie_weights:
        tensors = _each_once(tensors, files.path)
    fill(speculator, tensors, files.path, written=lambda name: f"speculator.{name}")
    return speculator.eval()


def save_mlp(speculator: MlpSpeculator, path: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` in IBM's layout."""
    config = speculator.config
    content = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": config.hidden_size,
        "inner_dim": config.inner_size,
        "vocab_size": config.vocab_size,
        "n_predict": config.num_steps,
        "n_candidates": config.num_steps,
        "top_k_tokens_per_head": [1] * config.num_steps,
        "tie_weights": config.tie_weights,
        "scale_input": config.scale_input,
        "state_before_norm": config.feature_layers != (AFTER_NORM,),
        "torch_dtype": str(speculator.emb[0].weight.dtype).removeprefix("torch."),
    }
    tensors: dict[str, Tensor] = {}
    for part in ("emb", "proj", "head", "ln"):
        for step in range(config.num_steps):
            for name, tensor in of_step(getattr(speculator, part), step).state_dict().items():
                tensors[f"speculator.{part}.{step}.{name}"] = tensor.clone().contiguous()
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, path / "model.safetensors")


def _each_once(tensors: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Of tensors that are the same for all steps, the first."""
    once: dict[str, Tensor] = {}
    for name in sorted(tensors):
        match = _PART.fullmatch(name)
        first = f"{match[1]}.{int(match[1] == 'proj')}.{match[3]}" if match else name
        if match is None or int(match[2]) <= int(match[1] == "proj"):
            once[name] = tensors[name]
        elif first not in tensors or not torch.equal(tensors[name], tensors[first]):
            raise ModelLoadError(
                f"the speculator in {where} has tie_weights, but its tensors speculator.{first} and speculator.{name} "
                "are not the same; correct its config.json"
            )
    return once
