"""Which matrix of a backbone is stored how: one format for all, and overrides by pattern."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, cast

import msgspec

from headport.errors import QuantizeError, UsageError
from headport.manifest import StoredMatrix
from headport.quantize.blocks import BLOCKS
from headport.quantize.options import Options

__all__ = [
    "ACTIVATIONS",
    "BACKBONE_FORMATS",
    "BackboneRequest",
    "Override",
    "backbone_request",
    "module_path",
    "parse_override",
    "parse_stored",
    "plan_matrices",
    "refuse_head_options",
    "stored_text",
]

ACTIVATIONS = ("residual", "rounded", "exact")
FormatName = Literal["fp16", "int8", "int4"]
_HAS_BLOCKS = {"fp16": False, "int8": True, "int4": True}
_DEFAULT_BLOCK = {"int8": 64, "int4": 32}
_EMBEDDING_FORMATS = ("none", "fp16", "int8")
BACKBONE_FORMATS = ("none", *_HAS_BLOCKS)
_WEIGHT = ".weight"
_OVERRIDE_FORM = (
    "PATTERN=FORMAT[:BLOCK][:ACTIVATIONS], such as 'model.layers.0.*=none', "
    "'*.down_proj=int8:32' or '*.v_proj=int8:residual',"
)
_HEAD_OPTIONS = (
    *("name", "block", "asymmetric", "positive_scales", "calibration", "calibration_tokens"),
    *("activations", "rescore", "certify", "bound"),
)


@dataclass(frozen=True)
class Override:
    """Matrices whose name fits a pattern, and how they are stored; None: as they are."""

    pattern: str
    stored: StoredMatrix | None


@dataclass(frozen=True)
class BackboneRequest:
    """What is asked of a backbone."""

    matrices: StoredMatrix | None  # all that no override names
    overrides: tuple[Override, ...]  # the last one that fits decides
    embedding: StoredMatrix | None
    activations: Literal["residual", "rounded", "exact"]

    def __bool__(self) -> bool:
        return bool(self.matrices or self.overrides or self.embedding)


def backbone_request(options: Options) -> BackboneRequest:
    """What options ask of a backbone; false if nothing.

    Raises:
        UsageError: If they contradict each other, or name what does not exist.
    """
    if options.backbone_activations not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UsageError(f"--backbone-activations {options.backbone_activations}: use {known}")
    if options.embedding not in _EMBEDDING_FORMATS:
        known = ", ".join(_EMBEDDING_FORMATS)
        raise UsageError(f"--embedding {options.embedding}: use one of {known}")
    if options.embedding_block is not None and options.embedding != "int8":
        raise UsageError("--embedding-block has no meaning without --embedding int8")
    block = options.backbone_block
    if block is not None and not options.override and not _HAS_BLOCKS.get(options.backbone, False):
        raise UsageError("--backbone-block has no meaning without --backbone int8 or int4")
    shared = options.block if options.head == "int8" else None
    return BackboneRequest(
        matrices=stored_matrix(options.backbone, block, "--backbone"),
        overrides=tuple(parse_override(text, block) for text in options.override),
        embedding=stored_matrix(
            options.embedding, options.embedding_block or shared, "--embedding"
        ),
        activations=options.backbone_activations,
    )


def refuse_head_options(options: Options) -> None:
    """Refuse what only a head that is quantised could heed.

    Raises:
        UsageError: If such an option is given.
    """
    fields = {f.name: f for f in msgspec.structs.fields(Options)}
    given = [
        f"--{name.replace('_', '-')}"
        for name in _HEAD_OPTIONS
        if getattr(options, name) != fields[name].default
    ]
    if given:
        raise UsageError(f"{', '.join(given)} has no meaning without --head")


def stored_matrix(format_name: str, block: int | None, option: str) -> StoredMatrix | None:
    """A format and block (None: the format's own) as they are recorded; None for `none`.

    Raises:
        UsageError: If either does not exist.
    """
    if format_name not in BACKBONE_FORMATS:
        known = ", ".join(BACKBONE_FORMATS)
        raise UsageError(f"{option}: format {format_name!r} is not one of {known}")
    if format_name == "none":
        return None
    if not _HAS_BLOCKS[format_name]:
        return StoredMatrix(format=cast("FormatName", format_name), block=None)
    block = block or _DEFAULT_BLOCK[format_name]
    if block not in BLOCKS:
        raise UsageError(f"{option}: block {block} is not one of {', '.join(map(str, BLOCKS))}")
    return StoredMatrix(format=cast("FormatName", format_name), block=block)


def parse_override(text: str, block: int | None) -> Override:
    """Read `PATTERN=FORMAT[:BLOCK][:ACTIVATIONS]`.

    Args:
        text: As given; `*` and `?` in the pattern stand for any characters and any one.
        block: Block where the text names none; None for the format's own.

    Raises:
        UsageError: If it has another form, or the format or block does not exist.
    """
    pattern, equals, stored = text.rpartition("=")
    option = f"--override {text}"
    if not (equals and pattern):
        raise UsageError(f"{option}: {_OVERRIDE_FORM} expected")
    return Override(pattern, parse_stored(stored, block, option, _OVERRIDE_FORM))


def parse_stored(text: str, block: int | None, option: str, form: str) -> StoredMatrix | None:
    """Read `FORMAT[:BLOCK][:ACTIVATIONS]`; None for `none`.

    Args:
        text: As given.
        block: Block where the text names none; None for the format's own.
        option: Begins messages.
        form: How the option is written, for the message that says so.

    Raises:
        UsageError: If it is written otherwise, or the format or block does not exist.
    """
    format_name, *more = text.split(":")
    activations = more.pop() if more and more[-1] in ACTIVATIONS else None
    if len(more) > 1 or not all(part.isdecimal() for part in more):
        raise UsageError(f"{option}: {form} expected")
    if (more or activations) and not _HAS_BLOCKS.get(format_name, format_name != "none"):
        what = "blocks" if more else "activations of its own"
        raise UsageError(f"{option}: {format_name} has no {what}")
    how = stored_matrix(format_name, int(more[0]) if more else block, option)
    if how is not None and activations is not None:
        how = msgspec.structs.replace(how, activations=activations)
    return how


def stored_text(how: StoredMatrix | None) -> str:
    """`FORMAT[:BLOCK][:ACTIVATIONS]`, as `parse_stored` reads it."""
    parts = (how.format, how.block, how.activations) if how else ("none",)
    return ":".join(str(part) for part in parts if part)


def plan_matrices(
    names: Sequence[str], request: BackboneRequest, left: Iterable[str] = ()
) -> dict[str, StoredMatrix]:
    """Each matrix that is stored in fewer bits.

    Args:
        names: The backbone's matrices, by the weight's name.
        request: What is asked.
        left: Weights that are no such matrix; a pattern that fits only these is told so.

    Raises:
        QuantizeError: If a pattern fits no matrix.
    """
    plan = dict.fromkeys(names, request.matrices)
    faults = []
    for override in request.overrides:
        fitting = [name for name in names if _fits(name, override.pattern)]
        if not fitting:
            kept = any(_fits(name, override.pattern) for name in left)
            faults.append(override.pattern + (" (no product reads it)" if kept else ""))
        plan |= dict.fromkeys(fitting, override.stored)
    if faults:
        known = ", ".join(module_path(name) for name in names[:8]) or "none"
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise QuantizeError(
            f"--override: no matrix of the backbone fits {', '.join(map(repr, faults))}; "
            f"its matrices are {known}{more}"
        )
    return {name: stored for name, stored in plan.items() if stored is not None}


def module_path(name: str) -> str:
    """A weight's name as patterns are held against it first: without `.weight`."""
    return name.removesuffix(_WEIGHT)


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(module_path(name), pattern) or fnmatchcase(name, pattern)
