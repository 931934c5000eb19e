"""The files beside a merged model: tokenizer, configuration, licence, and how it was made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headport import __version__
from headport.bundle import MANIFEST, Bundle, carried_files, copy_files, file_entry
from headport.errors import BundleError

__all__ = ["RECORD", "read_config", "write_companions", "write_record"]

RECORD = "merge.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
# The class transformers 5 names for any tokenizer.json; the same object has this name in all
# releases, and other runtimes know no other.
_NEW_CLASS, _KNOWN_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"


def read_config(bundle: Bundle) -> dict[str, Any]:
    """A bundle's `config.json`.

    Raises:
        BundleError: If it has none, or it is not a JSON object.
    """
    path = bundle.file("config.json")
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise BundleError(f"{path}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise BundleError(f"{path}: a JSON object was expected")
    return found


def write_companions(bundle: Bundle, folder: Path) -> list[str]:
    """Copy what travels with a bundle; returns the names of the files that had to be changed."""
    copy_files(bundle.path, carried_files(bundle.manifest), folder)
    path = folder / _TOKENIZER_CONFIG
    if not path.is_file():
        return []
    values = json.loads(path.read_text("utf-8"))
    if values.get("tokenizer_class") != _NEW_CLASS:
        return []
    values["tokenizer_class"] = _KNOWN_CLASS
    write_json(path, values)
    return [_TOKENIZER_CONFIG]


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file as other tools do, ending in a newline."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_record(bundle: Bundle, runtimes: Sequence[str], folder: Path) -> None:
    """Write what the folder was made from, and the checksum of every file in it.

    Figures that another machine would measure differently are not in it: the same bundle gives the
    same bytes.
    """
    manifest = bundle.manifest
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    entries = {p.relative_to(folder).as_posix(): file_entry(p) for p in paths}
    record = {
        "schema_version": 1,
        "headport": __version__,
        "for": runtimes,
        "bundle": {
            "checkpoint": manifest.provenance.checkpoint,
            "checkpoint_sha256": manifest.provenance.sha256,
            "manifest_sha256": hashlib.sha256((bundle.path / MANIFEST).read_bytes()).hexdigest(),
            "target": manifest.target,
        },
        "session_options": manifest.session_options,
        "license": manifest.license.id,
        "files": {n: {"sha256": e.sha256, "bytes": e.bytes} for n, e in entries.items()},
    }
    write_json(folder / RECORD, record)
