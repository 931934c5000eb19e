"""Options of `headport engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from headport.command import OptionRecord, option, positional

__all__ = ["Options"]


class Options(OptionRecord, frozen=True):
    """Options of `headport engine`."""

    bundle: Annotated[Path, positional("bundle to read: portable, or lowered to tensorrt")]
    output: Annotated[Path, option("bundle folder to write", flag="-o", metavar="BUNDLE")]
    backend: Annotated[Literal["tensorrt", "tensorrt-rtx"], option("library that builds the plans")]
    compute_capability: Annotated[
        tuple[str, ...],
        option("tensorrt-rtx: GPU generations to build for (default: its own)", metavar="SM"),
    ] = ()
    profile: Annotated[
        tuple[str, ...],
        option(
            "smallest:usual:largest of batch, sequence, past and rows; a word without '=' begins "
            "another profile (default: fits the model's context)",
            metavar="DIMENSION=SIZES",
        ),
    ] = ()
    merged: Annotated[
        bool, option("one plan of backbone and head, which also gives hidden_states")
    ] = False
    top_k: Annotated[
        int | None,
        option("portable bundles: heads also give their K best logits and ids", metavar="K"),
    ] = None
    workspace: Annotated[int | None, option("memory for kernels", metavar="MIB")] = None
    timing_cache: Annotated[
        Path | None, option("file of kernel timings, read if there and written", metavar="FILE")
    ] = None
    version_compatible: Annotated[bool, option("plans that later versions load")] = False
    strip_weights: Annotated[bool, option("plans without weights, to be refitted")] = False
    weight_streaming: Annotated[bool, option("weights may stay in main memory")] = False
    timeout: Annotated[int, option("seconds that one plan may take", metavar="S")] = 1800
    memory: Annotated[
        int | None, option("MiB that the building process may use (Linux)", metavar="MIB")
    ] = None
    force: Annotated[bool, option("replace an existing bundle")] = False
