"""From a GGUF file to a model folder: bf16 safetensors, configuration, tokenizer and chat template.

The weights of a quantised GGUF file are expanded, not restored: the folder holds the quantised model, written
in bf16. Every engine that reads the folder therefore runs the same weights.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from tokenizers import pre_tokenizers

from foredraft.errors import ModelLoadError
from foredraft.target.wheels import PROVENANCE_FILE


def convert_gguf(
    gguf: Path,
    folder: Path,
    *,
    provenance: Mapping[str, Any] | None = None,
    on_step: Callable[[str], None] = lambda label: None,
) -> None:
    """Write the model in the file ``gguf`` to the new ``folder``, which appears complete or not at all.

    ``provenance`` is written to ``provenance.json`` in it, with the versions used. ``on_step`` is told what
    is done next.

    Raises:
        ModelLoadError: the folder exists already, or the file cannot be read as a causal language model.
    """
    if folder.exists():
        raise ModelLoadError(f"{folder} exists already; delete it or name another folder")
    unfinished = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with quiet_transformers():
            _write_model(gguf, unfinished, on_step)
    except Exception as error:  # whatever transformers raises for a file it cannot read
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ModelLoadError(f"{gguf} cannot be converted: {error}") from error
    record = {**(provenance or {}), "gguf": gguf.name, "dtype": "bfloat16"}
    record |= {"transformers": transformers.__version__, "torch": torch.__version__}
    (unfinished / PROVENANCE_FILE).write_text(json.dumps(record, indent=2) + "\n")
    unfinished.replace(folder)


def _write_model(gguf: Path, folder: Path, on_step: Callable[[str], None]) -> None:
    on_step("reading the weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    on_step("reading the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    _restore_pre_tokenizer(tokenizer, gguf)
    tokenizer.model_max_length = model.config.max_position_embeddings
    on_step("writing")
    # Both say "quantised by GGUF", which the expanded weights no longer are; save_pretrained would refuse.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # written for the owner only, unlike all the others
        shutil.copymode(folder / "config.json", weights)


def _restore_pre_tokenizer(tokenizer: Any, gguf: Path) -> None:
    """Give back the split into single digits, which GGUF keeps only as a name and transformers drops.

    Without it "x  12" is cut as "x", " ", " ", "1", "2" instead of "x", "  ", "1", "2".
    """
    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back transformers' warnings and progress bars, and leave its settings as they were."""
    log = transformers.utils.logging
    verbosity, had_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if had_bars:
            log.enable_progress_bar()
