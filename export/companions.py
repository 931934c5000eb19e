"""The files that travel beside the graphs: tokenizer, configuration, licence."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from headport.bundle import copy_files
from headport.errors import CheckpointError, ParityError
from headport.export.checkpoint import Checkpoint, quiet_libraries
from headport.export.gguf_metadata import read_text_field
from headport.manifest import License

__all__ = ["check_tokenizer", "generation_defaults", "write_companions", "write_licence"]

_TOKENIZER = "tokenizer.json"
_OPTIONAL = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
_LICENCE_PATTERNS = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*")
# Keys that name the machine or the program that wrote the file, not the model.
_PRIVATE = (
    "_name_or_path",
    "_model_name_or_path",
    "_from_model_config",
    "transformers_version",
    "quantization_config",
    "is_local",
    "local_files_only",
    "name_or_path",
    "tokenizer_file",
)

# Generation settings of transformers' own loop; they do not change which token comes next.
_INTERNAL = (
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "use_cache",
    "cache_implementation",
)

_TEXTS = (
    "The head is the last matrix of a language model.",
    "def add(a, b):\n    return a + b\n\n",
    "  leading spaces, naïve café, 中文, العربية, emoji 🙂🏽 and 12345.67",
    "",
    "line\r\nbreaks\tand\ttabs \u00a0 no-break",
)


def generation_defaults(model: Any) -> dict[str, Any]:
    """The checkpoint's generation defaults that are set, in plain JSON values."""
    if getattr(model, "generation_config", None) is None:  # it generates nothing
        return {}
    found = json.loads(model.generation_config.to_json_string(use_diff=True))
    dropped = (*_PRIVATE, *_INTERNAL)
    return {k: v for k, v in found.items() if v is not None and k not in dropped}


def write_companions(checkpoint: Checkpoint, tokenizer: Any, model: Any, folder: Path) -> None:
    """Write tokenizer and configuration files into the bundle.

    A Hugging Face folder's own files are copied as they are; a `.gguf` file holds them in its
    metadata, so what transformers made of it is saved.
    """
    with tempfile.TemporaryDirectory() as scratch, quiet_libraries():
        saved = Path(scratch)
        tokenizer.save_pretrained(saved)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(saved)
        own = saved if checkpoint.format == "gguf" else checkpoint.folder
        for name in (_TOKENIZER, *_OPTIONAL):
            source = own if (own / name).is_file() else saved
            if (source / name).is_file():
                copy_files(source, [name], folder)
    if not (folder / _TOKENIZER).is_file():
        raise CheckpointError(f"{checkpoint.name}: its tokenizer has no {_TOKENIZER} form")
    config = json.loads(model.config.to_json_string(use_diff=True))
    config.setdefault("architectures", [type(model).__name__])
    _write_json(folder / "config.json", config)
    tokenizer_config = folder / "tokenizer_config.json"
    if tokenizer_config.is_file():
        _write_json(tokenizer_config, json.loads(tokenizer_config.read_text("utf-8")))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    public = {k: v for k, v in values.items() if k not in _PRIVATE}
    text = json.dumps(public, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def check_tokenizer(folder: Path, tokenizer: Any) -> int:
    """Compare the bundle's tokenizer.json and `AutoTokenizer` on the bundle with the checkpoint's.

    Returns:
        The number of texts compared.

    Raises:
        ParityError: If a text gets other ids.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    fast = Tokenizer.from_file(str(folder / _TOKENIZER))
    with quiet_libraries():
        reloaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in _TEXTS:
        expected = tokenizer(text)["input_ids"]
        for name, ids in (
            (_TOKENIZER, fast.encode(text).ids),
            ("AutoTokenizer", reloaded(text)["input_ids"]),
        ):
            if list(ids) != list(expected):
                raise ParityError(
                    f"the bundle's tokenizer ({name}) gives other token ids than the checkpoint's "
                    f"for {text!r}; nothing was written"
                )
    return len(_TEXTS)


def write_licence(checkpoint: Checkpoint, folder: Path) -> License:
    """Copy the checkpoint's licence files and say which licence it states.

    Returns:
        The statement found: README front matter for a folder, `general.license` for a `.gguf`
        file; `id` is None where there is none.
    """
    own = checkpoint.folder
    names = sorted({p.name for pattern in _LICENCE_PATTERNS for p in own.glob(pattern)})
    files = tuple(name for name in names if (own / name).is_file())
    if checkpoint.format == "gguf":
        # A folder may hold files of many models; only what stands in this one is about it.
        files = ()
        stated = read_text_field(checkpoint.weight_files[0], "general.license")
        source = "general.license in the GGUF"
    else:
        stated, source = _readme_licence(own / "README.md"), "README.md front matter"
    copy_files(own, files, folder)
    if stated is None:
        source = f"{files[0]}, which names no identifier" if files else "no statement found"
    return License(id=stated, source=source, files=files)


def _readme_licence(readme: Path) -> str | None:
    if not readme.is_file():
        return None
    text = readme.read_text("utf-8", errors="replace")
    front = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    stated = front and re.search(r"^license:\s*[\"']?([^\s\"'#]+)", front.group(1), re.MULTILINE)
    return stated.group(1) if stated else None
