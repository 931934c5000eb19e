"""A mix as options of `headport quantize`, and as the command to type."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from headport.errors import UsageError
from headport.manifest import BackboneQuantization, StoredMatrix
from headport.quantize.backbone_plan import (
    backbone_request,
    parse_stored,
    plan_matrices,
    stored_text,
)
from headport.quantize.mix.groups import Group
from headport.quantize.options import Options

__all__ = ["command_line", "mix_options", "parse_formats"]

_FORM = "FORMAT[:BLOCK][:ACTIVATIONS] twice, the smaller first, such as int4:64 int8:64,"


def parse_formats(texts: Sequence[str]) -> tuple[StoredMatrix, StoredMatrix | None]:
    """Read the two formats of a mix; the larger may be `none`.

    Raises:
        UsageError: If they are not two, one does not exist, or they are the same.
    """
    option = f"--formats {' '.join(texts)}"
    if len(texts) != 2:
        raise UsageError(f"{option}: {_FORM} expected, {len(texts)} given")
    small, large = (parse_stored(text, None, option, _FORM) for text in texts)
    if small is None or small == large:
        raise UsageError(f"{option}: two formats expected, the first smaller than the second")
    return small, large


def mix_options(
    groups: Sequence[Group], chosen: Sequence[Group], formats: Sequence[StoredMatrix | None]
) -> dict[str, Any]:
    """Options of `headport quantize` that store a mix, as few patterns as possible.

    Args:
        groups: All of the backbone's matrices.
        chosen: Those that get the smaller format.
        formats: The smaller and the larger one.

    Returns:
        The options that differ from their defaults.
    """
    small, large = formats
    others = [group for group in groups if group not in chosen]
    wanted = {
        name: how
        for how, members in ((small, chosen), (large, others))
        for group in members
        for name in group.names
    }
    forms = [
        _options(base, how, list(patterns(groups, rest)))
        # A kind's pattern may fit another kind as well; those of groups fit their own matrices.
        for patterns in (_of_kinds, _of_groups)
        for base, how, rest in ((large, small, chosen), (small, large, list(others)))
    ]
    fitting = [each for each in forms if _gives(each, wanted)]
    return min(fitting, key=lambda each: len(each.get("override", ())))


def command_line(bundle: Path, options: dict[str, Any]) -> str | None:
    """The command that writes a mix beside a bundle; None if it leaves everything as it is."""
    if not options:
        return None
    words = ["headport", "quantize", str(bundle), "-o", f"{bundle}-mix"]
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


def _options(
    base: StoredMatrix | None, other: StoredMatrix | None, patterns: list[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    activations = "rounded"
    if base is not None:
        activations = base.activations or activations
        found = {"backbone": base.format, "backbone_block": base.block}
    text = stored_text(other)
    if other is not None and other.block is not None and other.activations is None:
        text += "" if activations == "rounded" else ":rounded"
    found["override"] = tuple(f"{pattern}={text}" for pattern in patterns)
    found["backbone_activations"] = activations
    defaults = {"backbone_block": None, "override": (), "backbone_activations": "rounded"}
    return {name: value for name, value in found.items() if value != defaults.get(name, "none")}


def _of_kinds(groups: Sequence[Group], chosen: Sequence[Group]) -> Iterator[str]:
    """Patterns of some groups; one for a kind of which all groups are among them."""
    for kind, found in groupby(groups, key=lambda group: group.kind):
        members = list(found)
        own = [group for group in members if group in chosen]
        if len(own) == len(members):
            yield kind
        else:
            yield from _of_groups(groups, own)


def _of_groups(groups: Sequence[Group], chosen: Sequence[Group]) -> Iterator[str]:
    del groups
    yield from (pattern for group in chosen for pattern in group.patterns)


def _gives(options: dict[str, Any], wanted: dict[str, StoredMatrix | None]) -> bool:
    """Whether `headport quantize` stores every matrix as wanted."""
    request = backbone_request(Options(bundle=Path(), output=Path(), **options))
    plan = plan_matrices(list(wanted), request)
    record = BackboneQuantization(matrices=plan, embedding={}, activations=request.activations)

    def shown(how: StoredMatrix | None, activations: str) -> tuple[Any, ...] | None:
        return None if how is None else (how.format, how.block, how.block and activations)

    return all(
        shown(plan.get(name), record.activations_of(plan[name]) if name in plan else "")
        == shown(how, (how.activations if how else None) or "rounded")
        for name, how in wanted.items()
    )
