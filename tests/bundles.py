"""A bundle of plain files, for tests of the folder itself; no graph in it can be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headport.bundle import Bundle, draft_bundle
from headport.manifest import (
    SCHEMA_VERSION,
    Graph,
    Head,
    License,
    Manifest,
    Model,
    Port,
    Provenance,
    Tensor,
    Vocabulary,
)

FILES = {"backbone.onnx": b"backbone", "head.lm.onnx": b"head", "data/shared.bin": b"\1\2\3\4"}


def manifest(**changes: Any) -> Manifest:
    """A complete manifest for `FILES`."""
    hidden = Port(name="hidden_states", dtype="float", shape=("rows", 4))
    return msgspec.structs.replace(
        Manifest(
            schema_version=SCHEMA_VERSION,
            license=License(id=None, source="no statement found", files=()),
            provenance=Provenance(checkpoint="tiny", format="safetensors", sha256="0", stages=()),
            model=Model(architecture="Tiny", hidden_size=4, layers=1, max_context=16, dtype="fp32"),
            graphs={
                "backbone": Graph(
                    file="backbone.onnx", role="backbone", inputs=(), outputs=(hidden,)
                ),
                "head.lm": Graph(file="head.lm.onnx", role="head", inputs=(hidden,), outputs=()),
            },
            heads={
                "lm": Head(
                    graph="head.lm",
                    outputs="logits",
                    vocab_size=1,
                    scale=1.0,
                    softcap=None,
                    bias=False,
                    weight="w",
                    tied=True,
                    quantization=None,
                )
            },
            tensors=(
                Tensor(
                    name="w",
                    sha256="0",
                    dtype="int8",
                    shape=(4,),
                    file="data/shared.bin",
                    offset=0,
                    length=4,
                    consumers=("backbone:e", "head.lm:w"),
                ),
            ),
            vocabulary=Vocabulary(size=1, padded_size=1, kept_size=None, map=None),
            defaults={},
            session_options={},
            target="portable",
            selftest=None,
            files={},
        ),
        **changes,
    )


def write_bundle(output: Path, *, force: bool = False, **changes: Any) -> Bundle:
    """Write `FILES` and the manifest as a bundle."""
    with draft_bundle(output, force=force) as draft:
        for name, data in FILES.items():
            (draft.path / name).parent.mkdir(exist_ok=True)
            (draft.path / name).write_bytes(data)
        return draft.commit(manifest(**changes))
