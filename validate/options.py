"""Options of `headport validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from headport.command import OptionRecord, option, positional
from headport.providers import FALLBACK_HELP, PROVIDER_HELP, ProviderChoice

__all__ = ["Options"]


class Options(OptionRecord, frozen=True):
    """Options of `headport validate`."""

    bundle: Annotated[Path, positional("bundle folder, portable or lowered")]
    reference: Annotated[
        str,
        option(
            "to compare with: Hugging Face folder, .gguf, module:function, or a folder that "
            "`headport reference` wrote",
            metavar="MODEL",
        ),
    ]
    text: Annotated[
        tuple[Path, ...],
        option(
            "plain UTF-8 texts, or .jsonl files of records, which an encoder-decoder bundle needs; "
            "each reported by name; a stored reference brings its own",
            metavar="FILE",
        ),
    ] = ()
    gates: Annotated[
        Path | None, option("limits that decide (TOML; default: those of the recipe)")
    ] = None
    markdown: Annotated[Path | None, option("also write the report as Markdown")] = None
    html: Annotated[Path | None, option("also write the report as one HTML page")] = None
    junit: Annotated[
        Path | None, option("also write the gates as JUnit XML, a test case each", metavar="FILE")
    ] = None
    force: Annotated[bool, option("replace existing --markdown, --html and --junit files")] = False
    adapter: Annotated[
        Path | None,
        option("the adapter that the bundle was exported with", metavar="FOLDER"),
    ] = None
    condition: Annotated[
        str | None,
        option(
            "what hidden states are told on both sides: a stored name, or a .npy file of values",
            metavar="NAME",
        ),
    ] = None
    projection: Annotated[
        Path | None,
        option("with --condition: the file that `export --condition` was given", metavar="FILE"),
    ] = None
    max_tokens: Annotated[
        int, option("tokens to score in all, an equal share of each text (default: 0, all)")
    ] = 0
    window: Annotated[int, option("tokens fed at once at most; the context bounds it too")] = 1024
    batch_size: Annotated[int, option("windows that the bundle runs together")] = 1
    overlap: Annotated[
        int, option("tokens that a window repeats of the one before, as context only")
    ] = 0
    ignore_ids: Annotated[
        tuple[int, ...], option("token ids that are fed but not scored", metavar="ID")
    ] = ()
    greedy_tokens: Annotated[int, option("new tokens of each greedy run, 0 for none")] = 32
    attribution_tokens: Annotated[
        int, option("tokens on which the drift is split into parts, 0 for none")
    ] = 512
    noise_floor_tokens: Annotated[
        int, option("tokens on which the reference is held against itself, 0 for none")
    ] = 256
    unquantised: Annotated[
        Path | None, option("the bundle before quantisation: a midpoint of the split")
    ] = None
    bisect: Annotated[
        bool, option("find the layer of the backbone that first leaves the reference")
    ] = False
    sampler: Annotated[
        bool, option("hold the runtimes' samplers against transformers' on shared noise")
    ] = False
    baseline: Annotated[
        Path | None, option("earlier report (--json) that must not be worse", metavar="REPORT")
    ] = None
    provider: Annotated[ProviderChoice, option(PROVIDER_HELP)] = "auto"
    cpu_fallback: Annotated[bool, option(FALLBACK_HELP)] = False
    trust_remote_code: Annotated[bool, option("as for export")] = False
    allow_pickle: Annotated[bool, option("as for export")] = False
