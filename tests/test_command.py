"""Options exist once: the command line, recipes and Python see the same record."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from headport.command import (
    OptionRecord,
    add_arguments,
    option,
    options_from_namespace,
    positional,
    record_from_mapping,
)
from headport.errors import UsageError


class Sample(OptionRecord, frozen=True):
    """Every kind of option."""

    source: Annotated[Path, positional("input")]
    output: Annotated[Path, option("output", flag="-o")]
    block: Annotated[int, option("block size")] = 64
    head: Annotated[Literal["int8", "fp16"], option("head format")] = "int8"
    text: Annotated[tuple[Path, ...], option("text files")] = ()
    top_p: Annotated[float | None, option("nucleus")] = None
    force: Annotated[bool, option("replace")] = False


def _parse(*arguments: str) -> Sample:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Sample)
    found: Sample = options_from_namespace(Sample, parser.parse_args(arguments))
    return found


def test_defaults_come_from_the_record() -> None:
    assert _parse("a", "-o", "b") == Sample(source=Path("a"), output=Path("b"))


def test_every_kind_is_parsed() -> None:
    line = "a --output b --block 32 --head fp16 --text x y --top-p 0.5 --force"
    assert _parse(*line.split()) == Sample(
        source=Path("a"),
        output=Path("b"),
        block=32,
        head="fp16",
        text=(Path("x"), Path("y")),
        top_p=0.5,
        force=True,
    )


def test_an_option_that_is_given_twice_keeps_what_came_first() -> None:
    found = _parse("a", "-o", "b", "--text", "x", "y", "--text", "z")
    assert found.text == (Path("x"), Path("y"), Path("z"))
    assert _parse("a", "-o", "b").text == ()  # nothing is left in the default


def test_an_option_may_be_named_by_a_word_python_keeps_for_itself() -> None:
    class Keyword(OptionRecord, frozen=True):
        runtime: Annotated[str, option("what it is for")] = msgspec.field(default="all", name="for")

    parser = argparse.ArgumentParser()
    add_arguments(parser, Keyword)
    for line, expected in (([], "all"), (["--for", "one"], "one")):
        found: Keyword = options_from_namespace(Keyword, parser.parse_args(line))
        assert found == Keyword(runtime=expected)


@pytest.mark.parametrize("line", ["a", "-o b", "a -o b --head int3", "a -o b --block x"])
def test_wrong_lines_exit_2(line: str) -> None:
    with pytest.raises(SystemExit) as error:
        _parse(*line.split())
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "a", "output": "b", "blok": 3}, "unknown field `blok`"),
        (
            {"source": "a", "output": "b", "block": "3"},
            r"Expected `int`, got `str` - at `\$.block`",
        ),
        ({"source": "a", "output": "b", "head": "int3"}, "int3"),
        ({"source": "a"}, "missing required field `output`"),
    ],
)
def test_mappings_are_checked(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        record_from_mapping(Sample, values, "recipe.toml")
