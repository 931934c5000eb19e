"""A mix as options of `headport quantize`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import pytest

from headport.command import add_arguments, options_from_namespace
from headport.errors import UsageError
from headport.quantize.backbone_plan import backbone_request, plan_matrices
from headport.quantize.mix.groups import Group, find_groups
from headport.quantize.mix.request import command_line, mix_options, parse_formats
from headport.quantize.options import Options

NAMES = [f"m.{n}.{kind}.weight" for n in range(4) for kind in ("q", "v", "up")]
GROUPS = find_groups(NAMES, 2)  # q 0-1, q 2-3, v 0-1, …


def _chosen(*labels: str) -> list[Group]:
    found = [group for group in GROUPS if group.label in labels]
    assert len(found) == len(labels)
    return found


@pytest.mark.parametrize(
    ("formats", "labels", "expected"),
    [
        ("int4:64 int8:64", (), {"backbone": "int8", "backbone_block": 64}),
        (
            "int4:64 int8:64",
            ("m.*.q 0-1", "m.*.q 2-3", "m.*.v 2-3"),
            {
                "backbone": "int8",
                "backbone_block": 64,
                "override": ("m.*.q=int4:64", "m.[2-3].v=int4:64"),
            },
        ),
        (
            "int4:32 int8:64:residual",
            ("m.*.q 0-1", "m.*.q 2-3", "m.*.v 0-1", "m.*.up 0-1", "m.*.up 2-3"),
            {
                "backbone": "int4",
                "backbone_block": 32,
                "override": ("m.[2-3].v=int8:64:residual",),
            },
        ),
        (
            "int4:32 int8:64:residual",
            ("m.*.q 0-1",),
            {
                "backbone": "int8",
                "backbone_block": 64,
                "override": ("m.[0-1].q=int4:32:rounded",),
                "backbone_activations": "residual",
            },
        ),
        ("int8:32 none", ("m.*.q 0-1",), {"override": ("m.[0-1].q=int8:32",)}),
        (
            "int8:32 fp16",
            ("m.*.up 0-1",),
            {"backbone": "fp16", "override": ("m.[0-1].up=int8:32",)},
        ),
        ("int8:32 none", (), {}),
    ],
)
def test_options_are_few_and_give_the_mix(
    formats: str, labels: tuple[str, ...], expected: dict[str, Any]
) -> None:
    small, large = parse_formats(formats.split())
    chosen = _chosen(*labels)
    options = mix_options(GROUPS, chosen, (small, large))
    assert options == expected
    command = command_line(Path("b/x y"), options)
    if not expected:
        assert command is None
        return
    assert command is not None
    verb, *arguments = shlex.split(command)[1:]
    assert verb == "quantize"
    parser = argparse.ArgumentParser()
    add_arguments(parser, Options)
    typed: Options = options_from_namespace(Options, parser.parse_args(arguments))
    assert typed.bundle == Path("b/x y") and typed.output == Path("b/x y-mix")
    plan = plan_matrices(NAMES, backbone_request(typed))
    own = {name for group in chosen for name in group.names}
    for name in NAMES:
        how, found = small if name in own else large, plan.get(name)
        assert (how and how.format, how and how.block) == (
            found and found.format,
            found and found.block,
        )


def test_a_kind_whose_pattern_fits_another_is_named_by_its_layers() -> None:
    # `l.*.up` of all layers fits `l.0.e.up` too, which is another kind.
    groups = find_groups(["l.0.up", "l.1.up", "l.0.e.up", "l.0.q", "l.1.q"], 1)
    up = [group for group in groups if group.kind == "l.*.up"]
    small, large = parse_formats(["int4:64", "int8:64"])
    options = mix_options(groups, up, (small, large))
    assert options["override"] == ("l.[0-1].up=int4:64",)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("int4:64",), "twice, the smaller first, such as int4:64 int8:64, expected, 1 given"),
        (("int4", "int8", "fp16"), "3 given"),
        (("int4:x", "int8"), "FORMAT"),
        (("int3", "int8"), "format 'int3' is not one of none, fp16, int8, int4"),
        (("int4:48", "int8"), "block 48 is not one of"),
        (("none", "int8"), "the first smaller than the second"),
        (("int8:64", "int8"), "two formats expected"),
    ],
)
def test_formats_that_are_none(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_formats(texts)
