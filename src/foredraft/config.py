"""Configuration: frozen, keyword-only, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from foredraft.errors import InvalidOptionError
from foredraft.types import check_option_names

METHODS = ("none", "ngram", "draft_model")
TREE_METHODS = ("draft_model",)
ACCEPTANCE_RULES = ("auto", "rejection", "block", "coupled", "match", "typical")
POLICIES = ("goodput", "fixed")
NUMERICS = ("invariant", "fast")
DEFAULT_NUM_SPECULATIVE_TOKENS = {"none": 0, "ngram": 7, "draft_model": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """How tokens are drafted and accepted. Names as in vLLM where the meaning is the same.

    Attributes:
        method: ``none``, ``ngram`` (copy what followed the last words before) or ``draft_model``.
        num_speculative_tokens: most draft tokens of a step, all nodes of a tree counted; None takes the method's
            default.
        tree_width: most children of a token in the draft; 1 drafts chains.
        tree_depth: longest path of a tree; None takes ``num_speculative_tokens / tree_width`` for a draft model.
        model: the draft model, for ``draft_model``: folder, hub id or short name.
        prompt_lookup_max, prompt_lookup_min: longest and shortest suffix that ``ngram`` looks up.
        policy: ``goodput`` chooses each step's draft lengths, 0 included, from measured step times and acceptance;
            ``fixed`` always drafts ``num_speculative_tokens``.
        acceptance_rule: ``auto`` is ``coupled`` for requests with a seed and ``rejection`` for others;
            greedy requests always accept on equality with the target's argmax.
        allow_lossy: needed for ``typical``, which changes the output's distribution.
        posterior_threshold, posterior_alpha: of ``typical`` (Medusa's epsilon and delta).
    """

    method: str = "none"
    num_speculative_tokens: int | None = None
    tree_width: int = 1
    tree_depth: int | None = None
    model: str | None = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    policy: str = "goodput"
    acceptance_rule: str = "auto"
    allow_lossy: bool = False
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

    def __post_init__(self) -> None:
        _check_choice("method", self.method, METHODS)
        _check_choice("policy", self.policy, POLICIES)
        _check_choice("acceptance_rule", self.acceptance_rule, ACCEPTANCE_RULES)
        if self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", DEFAULT_NUM_SPECULATIVE_TOKENS[self.method])
        if not 0 <= self.max_draft_tokens <= 64:
            raise InvalidOptionError(
                f"num_speculative_tokens={self.num_speculative_tokens} is outside [0, 64]; 0 is plain decoding"
            )
        if self.tree_width < 1 or (self.tree_depth is not None and self.tree_depth < 1):
            raise InvalidOptionError(
                f"tree_width={self.tree_width} and tree_depth={self.tree_depth} must be at least 1; width 1 is a chain"
            )
        if self.tree_width > 1 and self.method not in TREE_METHODS:
            raise InvalidOptionError(
                f"tree_width={self.tree_width} has no effect with method {self.method!r}, which drafts chains; "
                f"methods with trees: {', '.join(TREE_METHODS)}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise InvalidOptionError(
                f"prompt_lookup_min={self.prompt_lookup_min} must be at least 1 and at most "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )
        if self.method == "draft_model" and not self.model:
            raise InvalidOptionError("method 'draft_model' needs model=: a folder, hub id or short name")
        if self.method != "draft_model" and self.model:
            raise InvalidOptionError(f"model={self.model!r} has no effect with method {self.method!r}; leave it out")
        if self.acceptance_rule == "typical" and not self.allow_lossy:
            raise InvalidOptionError(
                "acceptance_rule 'typical' changes the output's distribution; pass allow_lossy=True if that is wanted"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig:
        """Build from a mapping as vLLM takes it; an unknown name raises and the nearest one is named."""
        if isinstance(options, SpeculativeConfig):
            return options
        check_option_names(options or {}, tuple(f.name for f in fields(cls)), "speculative_config")
        return cls(**(options or {}))

    @property
    def max_draft_tokens(self) -> int:
        return self.num_speculative_tokens or 0

    @property
    def is_lossy(self) -> bool:
        return self.acceptance_rule == "typical"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The model and how it is run.

    Attributes:
        model: folder, hub id or short name.
        dtype: ``auto`` (the checkpoint's), ``bfloat16``, ``float16`` or ``float32``.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``.
        max_model_len: most tokens of a prompt with its output; None takes the model's own limit.
        max_num_seqs: most sequences in one batch.
        max_num_batched_tokens: most tokens of one pass; longer prompts are fed in chunks.
        numerics: ``invariant`` keeps to shapes that give a row the same bits in any batch; ``fast`` takes
            the narrowest pass.
        packed: pack weights and fuse modules (checked against the model's own).
        compile: run the model through torch.compile; pays on a GPU, or where the CPU kernels cannot be built.
        num_threads: of torch on the CPU; None leaves torch's setting.
        cache_dir: where models, kernels and measurements are kept.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    numerics: str = "invariant"
    packed: bool = True
    compile: bool = False
    num_threads: int | None = None
    trust_remote_code: bool = False
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        _check_choice("numerics", self.numerics, NUMERICS)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidOptionError(f"{name}={value} is below 1; use a positive number")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from keyword arguments; an unknown name raises and the nearest one is named."""
        check_option_names(options, tuple(f.name for f in fields(cls)), "LLM")
        return cls(**options)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidOptionError(f"{name}={value!r} is not one of {', '.join(choices)}{hint}")
