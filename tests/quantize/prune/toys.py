"""Bundles with a tokenizer of their own, whose graphs run although no model was exported."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from headport.bundle import Bundle
from headport.manifest import Vocabulary
from headport.quantize.count.table import CountsRecord, TokenCounts, write_counts
from headport.quantize.prune import Options, prune
from tests.bundles import manifest
from tests.quantize.prune.tokenizers_of import CHAT, LINES
from tests.toy_bundles import lookup_backbone, write_toy

H = 24


def write_companions(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    generation: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    chat: str | None = None,
) -> None:
    """Tokenizer and configuration files as a bundle carries them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "LICENSE").write_text("do as you like\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    files: dict[str, Any] = {
        "config.json": {"vocab_size": tokenizer.get_vocab_size()} | (config or {}),
        "generation_config.json": generation or {},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, fields in files.items():
        (folder / name).write_text(json.dumps(fields))
    if chat is not None:
        (folder / "chat_template.jinja").write_text(chat)


def tokenizer_bundle(folder: Path, tokenizer: Tokenizer, **files: Any) -> Bundle:
    """A bundle of companions alone, for what looks at no graph."""
    write_companions(folder, tokenizer, **files)
    size = max(tokenizer.get_vocab().values()) + 1
    vocabulary = Vocabulary(size=size, padded_size=size, kept_size=None, map=None)
    defaults = files.get("generation") or {}
    return Bundle(folder, manifest(vocabulary=vocabulary, defaults=defaults))


def _backbone(embedding: np.ndarray) -> ir.Model:
    """A lookup whose rows are not the graph's output themselves, as in any model."""
    model = lookup_backbone(embedding)
    [rows] = model.graph.outputs
    rows.name = "rows"
    node = ir.node("Identity", [rows])
    [hidden] = node.outputs
    hidden.name, hidden.type, hidden.shape = "hidden_states", rows.type, rows.shape
    model.graph.append(node)
    model.graph.outputs[:] = [hidden]
    return model


def write_bundle(
    output: Path,
    tokenizer: Tokenizer,
    *,
    padding: int = 0,
    tied: bool = False,
    bias: bool = False,
    width: int = H,
    dtype: str = "float32",
    generation: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    chat: str | None = CHAT,
    **form: Any,
) -> Bundle:
    """A portable bundle: a lookup, and a head of random weights with `padding` rows too many.

    `form` is what else `write_toy` takes, such as `scale`.
    """
    size = max(tokenizer.get_vocab().values()) + 1
    V = size + padding
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(V, width)).astype(dtype)
    embedding = weight if tied else rng.normal(size=(V, width)).astype(dtype)

    def companions(folder: Path) -> None:
        write_companions(
            folder,
            tokenizer,
            generation=generation,
            config={"vocab_size": V} | (config or {}),
            chat=chat,
        )

    return write_toy(
        output,
        weight,
        bias=rng.normal(size=V).astype(np.float32) if bias else None,
        tied=tied,
        backbone=_backbone(embedding),
        companions=companions,
        vocabulary=Vocabulary(size=size, padded_size=V, kept_size=None, map=None),
        defaults=generation or {},
        **form,
    )


def count_texts(
    path: Path, bundle: Bundle, lines: tuple[str, ...] = LINES[:2], **changes: Any
) -> Path:
    """A table of counts of some lines by a bundle's tokenizer."""
    file = bundle.path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    size = max(tokenizer.get_vocab().values()) + 1
    counts = np.zeros(size, np.int64)
    for line in lines:
        for token_id in tokenizer.encode(line, add_special_tokens=False).ids:
            counts[token_id] += 1
    record = CountsRecord(
        **{
            "schema_version": 1,
            "tokenizer_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "vocab_size": size,
            "documents": len(lines),
            "tokens": int(counts.sum()),
            "bytes": sum(len(line.encode()) for line in lines),
            "files": (),
            "method": "plain",
            "method_reason": "a test",
            "held_out": None,
            "deduplication": None,
            "skipped_documents": 0,
        }
        | changes
    )
    write_counts(path, TokenCounts(counts, record), force=True)
    return path


def prune_toy(tmp_path: Path, source: Bundle, name: str = "pruned", **options: Any) -> Bundle:
    """A bundle cut to what two lines use."""
    counts = options.pop("counts", None) or count_texts(tmp_path / "counts.parquet", source)
    asked = {"least": 1, **options}
    return prune(Options(bundle=source.path, output=tmp_path / name, counts=counts, **asked))


def kept_ids(bundle: Bundle) -> np.ndarray:
    """Id before of each column of the head after."""
    vocabulary = bundle.manifest.vocabulary
    file = vocabulary.map or vocabulary.checkpoint_ids
    assert file is not None
    ids = np.load(bundle.path / file)
    assert ids.dtype == np.int32 and (np.diff(ids) > 0).all()
    return ids
