"""What is measured: engines, their modes, and the processes that they run in.

Only modes without a memory of earlier answers are here, for every prompt is asked several times. llama.cpp's
``ngram-mod`` and ``ngram-cache`` keep the n-grams of past requests; so does vLLM's ``suffix`` unless told otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments import vllm_environment
from prepare import export_openvino, make_gguf

OURS = "foredraft"
NEEDED = {"transformers": 1.5, "vllm": 1.5, "openvino": 1.0, "llama.cpp": 1.0}
"""The ratio of our best arm to each peer's best mode that the project wants to reach."""

BEAM = {"num_speculative_tokens": 7, "tree_width": 3, "tree_beam": 1}
"""Drafts of a head that are chains with other tokens beside their own."""
TRANSFORMERS = {"none": "none", "ngram": "ngram"}
VLLM: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}
VLLM_SUFFIX = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
OPENVINO: dict[str, dict[str, Any]] = {
    "none": {},
    "none, SDPA": {"pipeline": {"ATTENTION_BACKEND": "SDPA"}},
    "prompt lookup": {
        "pipeline": {"prompt_lookup": True},
        "generation": {"num_assistant_tokens": 5, "max_ngram_size": 3},
    },
}
LLAMA_CPP = {
    "none": [],
    "ngram-map-k": [
        "--spec-type", "ngram-map-k", "--spec-draft-n-max", "10",
        "--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k-size-m", "10",
    ],
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine with some of its modes, in one process.

    Attributes:
        model: what it loads: a folder or a file.
        more: further entries of the worker's settings.
    """

    name: str
    python: str
    script: str
    model: str
    modes: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


def engines(options: argparse.Namespace, folder: Path) -> list[Engine]:
    """All engines that the options name an environment for; makes the files that they need."""
    threads, model = options.threads, str(folder)
    openmp = {"OMP_NUM_THREADS": str(threads)}
    chosen = [
        Engine(
            name=OURS, python=sys.executable, script="foredraft_worker.py", model=model,
            modes=our_modes(options.head, options.policies, options.arm), environment=openmp,
        ),
        Engine(
            name="transformers", python=sys.executable, script="transformers_worker.py", model=model,
            modes=TRANSFORMERS, environment=openmp,
        ),
    ]  # fmt: skip
    if options.vllm_python:
        environment = vllm_environment(options.vllm_python, threads)
        for name, speculative in vllm_modes(options.vllm_python, options.head).items():
            chosen.append(
                Engine(
                    name="vllm", python=options.vllm_python, script="vllm_worker.py", model=model,
                    modes={name: speculative}, environment=environment,
                )
            )  # fmt: skip
    if options.openvino_python:
        exported = export_openvino(options.openvino_python, folder, options.cache)
        chosen.append(
            Engine(
                name="openvino", python=options.openvino_python, script="openvino_worker.py", model=str(exported),
                modes=OPENVINO, environment=openmp | {"PYTHONPATH": ""},
            )
        )  # fmt: skip
    if options.llama_server:
        gguf = make_gguf(options.llama_python, options.llama_source, folder, options.cache)
        for name, arguments in LLAMA_CPP.items():
            chosen.append(
                Engine(
                    name="llama.cpp", python=sys.executable, script="llama_cpp_worker.py", model=str(gguf),
                    modes={name: arguments}, environment=openmp, more={"server": options.llama_server},
                )
            )  # fmt: skip
    return chosen


def left_out(options: argparse.Namespace) -> list[str]:
    """Peers that no environment was named for."""
    given = {"vllm": options.vllm_python, "openvino": options.openvino_python, "llama.cpp": options.llama_server}
    return [name for name, value in given.items() if not value]


def our_modes(head: str | None, policies: list[str], arms: list[str]) -> dict[str, dict[str, Any]]:
    """Speculative configurations by name: methods without and with a head, and those written by hand."""
    modes: dict[str, dict[str, Any]] = {"none": {"method": "none"}}
    for policy in policies:
        for method in ("ngram", "suffix"):
            modes[f"{method} {policy}"] = {"method": method, "policy": policy}
        for method in ("eagle3", "ngram+eagle3") if head else ():
            modes[f"{method} {policy}"] = {"method": method, "model": head, "policy": policy}
            modes[f"{method} beam {policy}"] = {"method": method, "model": head, "policy": policy, **BEAM}
    for text in arms:
        config = json.loads(text)
        others = [f"{key}={value}" for key, value in config.items() if key not in ("method", "model")]
        modes[" ".join([config["method"], *others])] = config
    return modes


def vllm_modes(python: str, head: str | None) -> dict[str, dict[str, Any] | None]:
    """Suffix decoding where the package that it needs is installed, and the head where there is one."""
    modes = dict(VLLM)
    if list(Path(python).parent.parent.glob("lib/python*/site-packages/arctic_inference")):
        modes["suffix"] = VLLM_SUFFIX
    if head:
        modes["eagle3"] = {"method": "eagle3", "model": head, "num_speculative_tokens": 4}
    return modes
