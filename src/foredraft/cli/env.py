"""``foredraft env``: versions, hardware, kernels, and what lies in the cache folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


def env(
    models: Annotated[bool, typer.Option("--models", help="Which kinds of models are run, and how, instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
) -> None:
    """Show what results on this machine depend on. Builds the CPU kernels if they are not there yet."""
    found = model_kinds() if models else describe()
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _model_rows(found) if models else _rows(found):
        table.add_row(f"[bold]{name}[/]", value)
    Console(highlight=False).print(table)


def model_kinds() -> dict[str, Any]:
    """Kinds of models (transformers' ``model_type``) by how they are run; the refused ones with the reason."""
    from foredraft.target import kinds

    return {
        "attention": sorted(kinds.ATTENTION),
        "replayed": sorted(kinds.REPLAYED),
        "stepped": sorted(kinds.STEPPED),
        "refused": dict(sorted(kinds.REFUSED.items())),
    }


def _model_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    def listed(how: str, names: str) -> str:
        return f"{how}\n{', '.join(found[names])}\n"

    reasons: dict[str, list[str]] = {}
    for name, reason in found["refused"].items():
        reasons.setdefault(reason, []).append(name)

    return [
        ("attention", listed("keys and values only; a rejected draft is cut off", "attention")),
        ("replay", listed("a state that cannot be cut; it is restored, and accepted tokens are fed again", "replayed")),
        ("token by token", listed("the same, but a token a call: exact, and no faster than plain decoding", "stepped")),
        ("refused", "\n".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()) + "\n"),
        ("all others", "checked when they are loaded: run if they give transformers' logits, or else refused by name"),
    ]


def describe() -> dict[str, Any]:
    """All facts as plain data."""
    import torch

    from foredraft.measure import machine
    from foredraft.target.zoo import TRAINED_HEADS, ZOO, cache_folder

    folder = cache_folder()
    return {
        "versions": machine.versions(),
        "hardware": {**machine.cpu(), "accelerators": machine.accelerators()},
        "threads": torch.get_num_threads(),
        "bf16_instructions": {
            "avx512_bf16": bool(torch.cpu._is_avx512_bf16_supported()),
            "amx_tile": bool(torch.cpu._is_amx_tile_supported()),
        },
        "kernels": kernels(folder),
        "cache_folder": str(folder),
        "models": _models(folder),
        "short_names": [*sorted(ZOO), *TRAINED_HEADS],
        "numerics": _numerics(folder),
    }


def kernels(folder: Path) -> dict[str, Any]:
    """Whether the CPU kernels can be used, and if not, why."""
    import torch

    from foredraft.target.native_build import native_library

    if native_library(folder) is not None:
        return {"built": True, "reason": None}
    if not torch.cpu._is_avx512_bf16_supported():
        reason = "this processor has no AVX512-BF16; torch's own kernels are used"
    elif shutil.which("g++") is None and shutil.which("clang++") is None:
        reason = "there is no C++ compiler; install g++ or clang++"
    else:
        reason = "the compiler failed, or torch brings no OpenMP runtime to link against"
    return {"built": False, "reason": reason}


def _models(folder: Path) -> list[dict[str, Any]]:
    """Models in the cache folder that are complete enough to have a configuration."""
    return [
        {"name": path.parent.name, "bytes": sum(f.stat().st_size for f in path.parent.rglob("*") if f.is_file())}
        for path in sorted(folder.glob("models/*/config.json"))
    ]


def _numerics(folder: Path) -> list[dict[str, Any]]:
    """Answers of the load-time self-check that are kept; one that cannot be read is left out."""
    answers = []
    for file in sorted(folder.glob("numerics/*.json")):
        try:
            stored = json.loads(file.read_text())
            answers.append({"key": file.stem, "contract": stored["contract"], "shape": stored["shape"]})
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return answers


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    hardware, kernel = found["hardware"], found["kernels"]
    memory = hardware["memory_bytes"]
    return [
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
        ("system", hardware["system"]),
        ("cpu", f"{hardware['cpu']}, {hardware['cores']} cores, {found['threads']} threads of torch"),
        ("cpu features", " ".join(hardware["cpu_features"]) or "none of those that matter for bf16"),
        ("memory", "unknown" if memory is None else f"{memory / 2**30:.1f} GiB"),
        ("accelerators", ", ".join(hardware["accelerators"]) or "none"),
        ("CPU kernels", "built" if kernel["built"] else f"not built: {kernel['reason']}"),
        ("cache folder", found["cache_folder"]),
        (
            "models there",
            "\n".join(f"{m['name']} ({m['bytes'] / 1e6:.0f} MB)" for m in found["models"]) or "none yet",
        ),
        ("short names", ", ".join(found["short_names"])),
        ("self-checks kept", "\n".join(f"{n['key']}: {n['contract']}" for n in found["numerics"]) or "none yet"),
    ]
