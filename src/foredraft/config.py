"""Configuration: frozen, keyword-only, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from foredraft.errors import InvalidOptionError
from foredraft.methods import METHODS
from foredraft.types import check_option_names

ACCEPTANCE_RULES = ("auto", "rejection", "block", "coupled", "match", "typical")
POLICIES = ("goodput", "fixed", "heuristic", "confidence", "specdec++", "tiers")
SPARSE_KV_SELECTIONS = ("window", "snapkv")
NUMERICS = ("invariant", "fast")
HETEROGENEOUS_VOCAB_METHODS = ("tli", "slem")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """How tokens are drafted and accepted. Names as in vLLM where the meaning is the same.

    Attributes:
        method: ``none``, ``ngram`` (copy what followed the last words before), ``suffix`` (what followed them most
            often, here and in earlier responses), ``prediction`` (the text that a request expects), ``recycling``
            (what the target found likely behind the same tokens), ``lookahead`` (the target's own guesses ahead) or
            ``draft_model``; ``pard`` (a draft model that fills in masks; in vLLM ``draft_model`` with
            ``parallel_drafting``); a head trained on the target's hidden states (``eagle3``, ``eagle``, ``mtp``,
            ``mlp``, ``medusa``, ``dflash``);
            or the target drafts for itself, with its first layers (``early_exit``), without some
            (``layer_skip``) or over a part of its cache (``sparse_kv``, for long texts); or several joined by ``+``,
            preferred in that order: ``ngram+draft_model``.
        num_speculative_tokens: most draft tokens of a step, all nodes of a tree counted; None takes each method's
            default.
        tree_width: most children of a token in the draft; 1 drafts chains.
        tree_depth: longest path of a tree; None takes ``num_speculative_tokens / tree_width`` for a draft model (with a
            ``tree_beam`` twice as much), and all places that they look ahead for ``pard`` and ``dflash``.
        tree_beam: tokens of a level of the tree that get children, each level being a pass of the draft model or head;
            None takes as many as ``tree_width``. 1 drafts a chain with other likely tokens beside its own: as cheap to
            draft as the chain, and cheap to verify where a pass of some more tokens costs hardly more.
        model: the draft model, for ``draft_model`` and ``pard``, or the head: folder, hub id or short name. ``mtp``
            without it takes the module that the target's own files hold.
        use_heterogeneous_vocab: the draft model has another tokenizer than the target.
        heterogeneous_vocab_method: ``tli`` drafts tokens that both vocabularies have (token-level intersection),
            ``slem`` drafts text and has the target's tokenizer cut it (string-level exact match; transformers'
            universal assisted generation).
        prompt_lookup_max, prompt_lookup_min: longest and shortest suffix that ``ngram`` looks up.
        suffix_decoding_max_tree_depth: longest suffix that ``suffix`` looks up.
        suffix_decoding_max_cached_requests: responses that ``suffix`` keeps for later requests, the oldest leaving
            first; 0 keeps none. Who can time answers can tell what is kept, so it is off by default.
        suffix_decoding_max_spec_factor: most draft tokens per token of the suffix found.
        suffix_decoding_min_token_prob: draft tokens are left out that were reached less often than that.
        suffix_decoding_store: file with the responses kept, read if it exists and written by ``LLM.close()``.
        lookahead_window_size, lookahead_ngram_size, lookahead_guess_size: of ``lookahead``: guesses made side by
            side, tokens of an n-gram, and n-grams tried at once (W, N and G in the paper).
        policy: ``goodput`` chooses each step's draft lengths, 0 included, from measured step times and acceptance;
            ``num_speculative_tokens`` is the most then. ``fixed`` always drafts so many. For comparison:
            ``heuristic`` (transformers' schedule of that name), ``confidence`` (a draft ends with a token less likely
            than the threshold), ``specdec++`` (it ends where a rejection has become likely) and ``tiers`` (lengths in
            tiers by mean acceptance, as SGLang).
        assistant_confidence_threshold: of ``confidence``; the name is transformers'.
        exit_layer: how many layers draft under ``early_exit``; None takes a third of them.
        skip_layers: layers left out under ``layer_skip``; None searches for them once (see ``drafters.layer_search``).
        sparse_kv_budget: most cache entries of a sequence that ``sparse_kv`` drafts over.
        sparse_kv_sinks: how many of them are the text's first tokens; the newest tokens are always among the others.
        sparse_kv_selection: ``window`` takes no others, ``snapkv`` also what the prompt's end attended to most.
        acceptance_rule: ``auto`` is ``coupled`` for requests with a seed and ``rejection`` for others;
            greedy requests always accept on equality with the target's argmax.
        allow_lossy: needed for ``typical``, which changes the output's distribution.
        posterior_threshold, posterior_alpha: of ``typical`` (Medusa's epsilon and delta).
    """

    method: str = "none"
    num_speculative_tokens: int | None = None
    tree_width: int = 1
    tree_depth: int | None = None
    tree_beam: int | None = None
    model: str | None = None
    use_heterogeneous_vocab: bool = False
    heterogeneous_vocab_method: str = "tli"
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 0
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_store: str | None = None
    lookahead_window_size: int = 5
    lookahead_ngram_size: int = 4
    lookahead_guess_size: int = 3
    policy: str = "goodput"
    assistant_confidence_threshold: float = 0.4
    exit_layer: int | None = None
    skip_layers: tuple[int, ...] | None = None
    sparse_kv_budget: int = 256
    sparse_kv_sinks: int = 4
    sparse_kv_selection: str = "window"
    acceptance_rule: str = "auto"
    allow_lossy: bool = False
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

    def __post_init__(self) -> None:
        check_method(self.method)
        _check_choice("policy", self.policy, POLICIES)
        _check_choice("acceptance_rule", self.acceptance_rule, ACCEPTANCE_RULES)
        _check_choice("heterogeneous_vocab_method", self.heterogeneous_vocab_method, HETEROGENEOUS_VOCAB_METHODS)
        if not 0 <= self.max_draft_tokens <= 64:
            raise InvalidOptionError(
                f"num_speculative_tokens={self.num_speculative_tokens} is outside [0, 64]; 0 is plain decoding"
            )
        if self.acceptance_rule == "typical" and not self.allow_lossy:
            raise InvalidOptionError(
                "acceptance_rule 'typical' changes the output's distribution; pass allow_lossy=True if that is wanted"
            )
        self._check_confidence()
        self._check_trees()
        self._check_draft_model()
        self._check_lookups()
        self._check_suffix_decoding()
        self._check_self_drafting()

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig:
        """Build from a mapping as vLLM takes it; an unknown name raises and the nearest one is named."""
        if isinstance(options, SpeculativeConfig):
            return options
        check_option_names(options or {}, tuple(f.name for f in fields(cls)), "speculative_config")
        return cls(**(options or {}))

    @property
    def methods(self) -> tuple[str, ...]:
        """The parts of ``method``."""
        return tuple(self.method.split("+"))

    @property
    def max_draft_tokens(self) -> int:
        return max(map(self.draft_limit, self.methods))

    def draft_limit(self, method: str) -> int:
        """Most draft tokens of one part of ``method``."""
        given = self.num_speculative_tokens
        return METHODS[method].num_speculative_tokens if given is None else given

    def depth_of_tree(self, method: str) -> int:
        """Levels of a tree that one part of ``method`` grows with passes of a model or head."""
        nodes_of_a_level = self.tree_width if self.tree_beam is None else 1 + self.tree_width // 2
        return self.tree_depth or max(2, self.draft_limit(method) // nodes_of_a_level)

    @property
    def is_lossy(self) -> bool:
        return self.acceptance_rule == "typical"

    def _check_confidence(self) -> None:
        threshold = self.assistant_confidence_threshold
        if not 0.0 <= threshold <= 1.0:
            raise InvalidOptionError(
                f"assistant_confidence_threshold={threshold} is outside [0, 1]; 0 never ends a draft early"
            )
        able = [name for name, method in METHODS.items() if method.has_confidence]
        fits = set(able) & set(self.methods) and self.tree_width == 1 and not self.use_heterogeneous_vocab
        if self.policy == "confidence" and not fits:
            raise InvalidOptionError(
                f"policy 'confidence' has no effect with method {self.method!r}, tree_width={self.tree_width} and "
                f"use_heterogeneous_vocab={self.use_heterogeneous_vocab}; it goes with chains of {', '.join(able)} in "
                "the target's vocabulary"
            )

    def _check_trees(self) -> None:
        if self.tree_width < 1 or (self.tree_depth is not None and self.tree_depth < 1):
            raise InvalidOptionError(
                f"tree_width={self.tree_width} and tree_depth={self.tree_depth} must be at least 1; width 1 is a chain"
            )
        if self.tree_width > 1 and not any(METHODS[method].takes_tree_width for method in self.methods):
            able = ", ".join(name for name, method in METHODS.items() if method.takes_tree_width)
            raise InvalidOptionError(
                f"tree_width={self.tree_width} has no effect with method {self.method!r}; it goes with {able}"
            )
        if self.tree_beam is None:
            return
        if not 1 <= self.tree_beam <= self.tree_width or self.tree_width == 1:
            raise InvalidOptionError(
                f"tree_beam={self.tree_beam} is outside [1, tree_width={self.tree_width}]; it goes with a tree_width "
                "above 1"
            )
        if not any(METHODS[method].takes_tree_beam for method in self.methods):
            able = ", ".join(name for name, method in METHODS.items() if method.takes_tree_beam)
            raise InvalidOptionError(
                f"tree_beam={self.tree_beam} has no effect with method {self.method!r}; it goes with {able}"
            )

    def _check_draft_model(self) -> None:
        takers = [method for method in self.methods if METHODS[method].takes_model]
        if not self.model and any(not METHODS[method].target_may_be_model for method in takers):
            raise InvalidOptionError(f"method {self.method!r} needs model=: a folder, hub id or short name")
        if len(takers) > 1:
            raise InvalidOptionError(
                f"method {self.method!r} needs a model= for each of {' and '.join(takers)} and there is one; leave out "
                "all but one of them"
            )
        if not takers and self.model:
            raise InvalidOptionError(f"model={self.model!r} has no effect with method {self.method!r}; leave it out")
        if "draft_model" not in self.methods and self.use_heterogeneous_vocab:
            raise InvalidOptionError(f"use_heterogeneous_vocab has no effect with method {self.method!r}; leave it out")
        if self.tree_width > 1 and self.use_heterogeneous_vocab:
            raise InvalidOptionError(
                f"tree_width={self.tree_width} has no effect with use_heterogeneous_vocab, which drafts chains; "
                "leave one of them out"
            )
        if self.heterogeneous_vocab_method != "tli" and not self.use_heterogeneous_vocab:
            raise InvalidOptionError(
                f"heterogeneous_vocab_method={self.heterogeneous_vocab_method!r} has no effect without "
                "use_heterogeneous_vocab=True; add it"
            )

    def _check_lookups(self) -> None:
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise InvalidOptionError(
                f"prompt_lookup_min={self.prompt_lookup_min} must be at least 1 and at most "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )
        for name, low in (("window_size", 1), ("ngram_size", 2), ("guess_size", 1)):
            value = getattr(self, f"lookahead_{name}")
            if value < low:
                raise InvalidOptionError(f"lookahead_{name}={value} is below {low}")

    def _check_suffix_decoding(self) -> None:
        prefix = "suffix_decoding_"
        if self.suffix_decoding_max_tree_depth < 1:
            raise InvalidOptionError(
                f"{prefix}max_tree_depth={self.suffix_decoding_max_tree_depth} is below 1; use a positive number"
            )
        if self.suffix_decoding_max_cached_requests < 0:
            raise InvalidOptionError(
                f"{prefix}max_cached_requests={self.suffix_decoding_max_cached_requests} is below 0; 0 keeps none"
            )
        if not self.suffix_decoding_max_spec_factor > 0.0:
            raise InvalidOptionError(
                f"{prefix}max_spec_factor={self.suffix_decoding_max_spec_factor} must be above 0; 1 drafts as many "
                "tokens as were found"
            )
        if not 0.0 <= self.suffix_decoding_min_token_prob <= 1.0:
            raise InvalidOptionError(
                f"{prefix}min_token_prob={self.suffix_decoding_min_token_prob} is outside [0, 1]; 0 leaves nothing out"
            )
        if self.suffix_decoding_store and not self.suffix_decoding_max_cached_requests:
            raise InvalidOptionError(
                f"{prefix}store={self.suffix_decoding_store!r} has no effect with {prefix}max_cached_requests=0; "
                "say how many responses are kept"
            )

    def _check_self_drafting(self) -> None:
        """The bounds that the model's layers set are checked when the drafter is built."""
        _check_choice("sparse_kv_selection", self.sparse_kv_selection, SPARSE_KV_SELECTIONS)
        for name, method in (("exit_layer", "early_exit"), ("skip_layers", "layer_skip")):
            value = getattr(self, name)
            if value is not None and method not in self.methods:
                raise InvalidOptionError(f"{name}={value} has no effect with method {self.method!r}; leave it out")
        if self.skip_layers is not None:
            object.__setattr__(self, "skip_layers", tuple(self.skip_layers))
        if self.sparse_kv_budget < 4 or not 0 <= self.sparse_kv_sinks <= self.sparse_kv_budget // 2:
            raise InvalidOptionError(
                f"sparse_kv_budget={self.sparse_kv_budget} must be at least 4, and sparse_kv_sinks="
                f"{self.sparse_kv_sinks} between 0 and half of it, so that there is room for the newest tokens"
            )


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
        kv_cache_gb: most GiB of keys and values of the target, the texts kept for reuse included, and the hidden states
            that are kept with them for heads. None takes 0.4 of the memory that is free on a CPU, and on a GPU what
            ``gpu_memory_utilization`` leaves. When it is full, the requests that came last wait and are computed again
            later.
        gpu_memory_utilization: share of the GPU's memory for weights and cache together; the rest is for passes.
        enable_prefix_caching: begin a request with the cache entries of the longest prefix that it shares with a
            running request or a recent one. None does so where the numerics make reused entries the same bits as new
            ones. Who can time answers can tell what is kept.
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
    kv_cache_gb: float | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool | None = None
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
        if self.kv_cache_gb is not None and not self.kv_cache_gb > 0.0:
            raise InvalidOptionError(f"kv_cache_gb={self.kv_cache_gb} must be above 0; None takes what is free")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InvalidOptionError(f"gpu_memory_utilization={self.gpu_memory_utilization} is outside (0, 1]")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from keyword arguments; an unknown name raises and the nearest one is named."""
        check_option_names(options, tuple(f.name for f in fields(cls)), "LLM")
        return cls(**options)


def check_method(method: str) -> None:
    """Raise :class:`InvalidOptionError` unless it is a method, or several different ones joined by ``+``."""
    parts = method.split("+")
    for part in parts:
        _check_choice("method", part, tuple(METHODS))
    if len(set(parts)) < len(parts) or (len(parts) > 1 and "none" in parts):
        raise InvalidOptionError(f"method={method!r} must join different methods that draft, as in 'ngram+draft_model'")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidOptionError(f"{name}={value!r} is not one of {', '.join(choices)}{hint}")
