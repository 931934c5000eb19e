"""Random models of given sizes, exported, quantised and lowered in a temporary folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.synthetic import write_checkpoint
from headport.export.command import Options as ExportOptions
from headport.export.command import export
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize import Options as QuantizeOptions
from headport.quantize import quantize

__all__ = ["Sizes", "bundle_of"]

_HEAD_SIZE = 64
_QUERIES_PER_KEY = 4


@dataclass(frozen=True)
class Sizes:
    """Of a Llama whose other sizes follow from these."""

    vocab: int = 16_384
    hidden: int = 512
    layers: int = 2
    context: int = 1024

    def __str__(self) -> str:
        return f"V {self.vocab}, H {self.hidden}, {self.layers} layers"


def bundle_of(sizes: Sizes, folder: Path, weights: str) -> Path:
    """The lowered bundle of a random model; what it was made from is deleted.

    Args:
        sizes: Of the model; `hidden` a multiple of 64.
        folder: Where to work.
        weights: `fp32`, or how backbone and head are stored: `int8` or `int4` with an INT8 head.
    """
    work = folder / f"{sizes.vocab}-{sizes.hidden}-{sizes.layers}-{sizes.context}"
    checkpoint, portable, small, target = (
        work / name for name in ("checkpoint", "portable", "small", "lowered")
    )
    checkpoint.mkdir(parents=True)
    heads = sizes.hidden // _HEAD_SIZE
    write_checkpoint(
        checkpoint,
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=8 * sizes.hidden // 3 // 64 * 64,
        num_hidden_layers=sizes.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // _QUERIES_PER_KEY),
        head_dim=_HEAD_SIZE,
        max_position_embeddings=sizes.context,
    )
    export(ExportOptions(model=str(checkpoint), output=portable))
    shutil.rmtree(checkpoint)
    if weights != "fp32":
        # The embedding is read a row at a time, so it stays as it is.
        quantize(
            QuantizeOptions(bundle=portable, output=small, backbone=weights, head="int8")  # type: ignore[arg-type]
        )
        shutil.rmtree(portable)
        portable = small
    lower(LowerOptions(bundle=portable, output=target, target="ort-cpu"))
    shutil.rmtree(portable)
    return target
