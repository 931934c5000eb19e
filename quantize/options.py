"""Options of `headport quantize`, which a sweep varies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from headport.command import OptionRecord, option, positional

__all__ = ["Options"]


class Options(OptionRecord, frozen=True):
    """Options of `headport quantize`."""

    bundle: Annotated[Path, positional("portable bundle to read")]
    output: Annotated[Path, option("bundle folder to write", flag="-o", metavar="BUNDLE")]
    head: Annotated[
        Literal["none", "int8", "int8-row", "int4", "fp16", "bf16", "fp8"],
        option("how the head's weight is stored; none: as it is"),
    ] = "none"
    name: Annotated[
        tuple[str, ...],
        option(
            "heads to quantise, or parts of them, as inspect names them (default: all that are "
            "over the vocabulary)",
            metavar="HEAD",
        ),
    ] = ()
    block: Annotated[
        Literal[16, 32, 64, 128, 256] | None,
        option("int8, int4: weights of a row that share a scale (default: int8 64, int4 32)"),
    ] = None
    asymmetric: Annotated[bool, option("int4: a zero point beside each scale")] = False
    positive_scales: Annotated[
        bool, option("int4 heads: no scale below 0, as TensorRT wants it; loses a little more")
    ] = False
    calibration: Annotated[
        tuple[Path, ...],
        option(
            "integers: texts on whose hidden states errors of rounding are compensated; "
            "without them every weight is rounded to nearest",
            metavar="FILE",
        ),
    ] = ()
    calibration_tokens: Annotated[
        int, option("at most this many tokens of the calibration texts", metavar="N")
    ] = 4096
    activations: Annotated[
        Literal["residual", "rounded", "exact", "static"],
        option(
            "integers, once lowered: hidden states as their rounded value plus the rounded rest, "
            "rounded once (fastest), or not rounded (slow); static: rounded in the graph by one "
            "scale of the calibration texts, for int8-row (W8A8)"
        ),
    ] = "residual"
    rescore: Annotated[
        int | None,
        option(
            "integers: give this many candidates per row, scored with the original weight, "
            "instead of all logits (without M: int8 64, int4 256)",
            metavar="M",
            bare=0,
        ),
    ] = None
    certify: Annotated[bool, option("int8: prove the candidates' ranks (implies --rescore)")] = (
        False
    )
    bound: Annotated[
        Literal["row", "block"], option("certify: one norm per row, or one per block of it")
    ] = "row"
    backbone: Annotated[
        Literal["none", "fp16", "int8", "int4"],
        option("how the backbone's matrices are stored; none: as they are"),
    ] = "none"
    backbone_block: Annotated[
        Literal[16, 32, 64, 128, 256] | None,
        option("backbone: weights of an output that share a scale (default: int8 64, int4 32)"),
    ] = None
    override: Annotated[
        tuple[str, ...],
        option(
            "other formats for the matrices that a pattern fits, such as '*.down_proj=int8:32', "
            "'*.v_proj=int8:residual' or 'model.layers.0.*=none'; the last pattern that fits "
            "decides",
            metavar="PATTERN=FORMAT[:BLOCK][:ACTIVATIONS]",
        ),
    ] = ()
    backbone_activations: Annotated[
        Literal["residual", "rounded", "exact"],
        option(
            "backbone, once lowered: its kernels round their inputs to INT8, also compute with "
            "what that lost, or round nothing (int8: then no kernel is faster than float32)"
        ),
    ] = "rounded"
    embedding: Annotated[
        Literal["none", "fp16", "int8"],
        option("how the input embedding is stored; none: as it is"),
    ] = "none"
    embedding_block: Annotated[
        Literal[16, 32, 64, 128, 256] | None,
        option("embedding int8: weights of a row that share a scale (default: the head's, or 64)"),
    ] = None
    force: Annotated[bool, option("replace an existing bundle")] = False
