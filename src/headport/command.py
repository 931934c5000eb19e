"""What every verb has in common: options as one record, and an outcome.

A command module offers `SUMMARY` (one sentence), `Options` (a frozen `OptionRecord`) and
`run(options) -> Outcome`. The command line, recipes and Python callers use the same record, so
an option exists once: its name, type, default and help text.
"""

from __future__ import annotations

import argparse
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headport.errors import UsageError

__all__ = [
    "OptionRecord",
    "Outcome",
    "add_arguments",
    "check_least",
    "option",
    "options_from_namespace",
    "positional",
    "record_from_mapping",
]


class OptionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a verb's options; fields are `Annotated[type, option("help")]`."""


@dataclass(frozen=True)
class Outcome:
    """What a verb has to say: text for the terminal, a document for `--json`, an exit code."""

    text: str
    document: Any
    exit_code: int = 0  # 0 passed, 1 a gate or parity failed, 2 wrong use


def option(
    text: str, *, flag: str | None = None, metavar: str | None = None, bare: Any = None
) -> msgspec.Meta:
    """Help text of a field; `flag` is a short form such as `-o`.

    `bare` is the value of the option where the command line gives none; without it one is needed.
    """
    return msgspec.Meta(description=text, extra={"flag": flag, "metavar": metavar, "bare": bare})


def positional(text: str) -> msgspec.Meta:
    """Help text of a field that is given by position."""
    return msgspec.Meta(description=text, extra={"positional": True})


def add_arguments(parser: argparse.ArgumentParser, record: type[OptionRecord]) -> None:
    """Add one command-line argument per field of an option record."""
    hints = typing.get_type_hints(record, include_extras=True)
    for field in msgspec.structs.fields(record):
        kind, meta = _split(hints[field.name])
        extra = meta.extra or {}
        settings: dict[str, Any] = {"help": _help(meta, field)}
        names = [f"--{field.encode_name.replace('_', '-')}"]
        if extra.get("positional"):
            names = [field.name]
            settings["metavar"] = field.name.upper()
        else:
            names = [extra["flag"], *names] if extra.get("flag") else names
            settings["dest"] = field.name
            settings["required"] = field.required
            if extra.get("metavar"):
                settings["metavar"] = extra["metavar"]
        settings |= _argument_type(kind)
        if extra.get("bare") is not None:
            settings |= {"nargs": "?", "const": extra["bare"]}
        if settings.get("action") == "store_true":
            settings.pop("required", None)
        if not field.required:
            settings["default"] = field.default
        parser.add_argument(*names, **settings)


class _Several(argparse.Action):
    """Values of an option that was given more than once: all of them, in order.

    argparse would keep those of the last time alone, and drop the others without a word.
    """

    def __call__(self, _parser: Any, namespace: Any, values: Any, _option: Any = None) -> None:
        before = getattr(namespace, self.dest)
        before = () if before is self.default else before
        setattr(namespace, self.dest, (*before, *values))


def options_from_namespace(record: type[OptionRecord], found: argparse.Namespace) -> Any:
    """The option record of a parsed command line."""
    fields = msgspec.structs.fields(record)
    values = {field.encode_name: getattr(found, field.name) for field in fields}
    return record_from_mapping(record, values, "command line")


def check_least(options: OptionRecord, bounds: dict[str, int]) -> None:
    """Hold numbers against their smallest value.

    Args:
        options: Of a verb.
        bounds: Field → smallest value.

    Raises:
        UsageError: If one is below; all such options are named.
    """
    faults = [
        f"--{name.replace('_', '-')}: at least {bound} expected, {getattr(options, name)} given"
        for name, bound in bounds.items()
        if getattr(options, name) < bound
    ]
    if faults:
        raise UsageError("; ".join(faults))


def record_from_mapping(record: type[Any], values: dict[str, Any], where: str) -> Any:
    """Check a mapping against a record.

    Raises:
        UsageError: If a key is unknown or missing, or a value has the wrong type or range.
    """
    try:
        # Paths and tuples arrive as they are; TOML and JSON values as plain types.
        return msgspec.convert(values, record, dec_hook=_decode_path, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from error


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise NotImplementedError(f"no conversion from {type(value).__name__} to {kind.__name__}")


def _split(hint: Any) -> tuple[Any, msgspec.Meta]:
    if typing.get_origin(hint) is typing.Annotated:
        kind, *notes = typing.get_args(hint)
        for note in notes:
            if isinstance(note, msgspec.Meta):
                return kind, note
        return kind, msgspec.Meta()
    return hint, msgspec.Meta()


def _help(meta: msgspec.Meta, field: Any) -> str:
    text = meta.description or ""
    shown = field.required or field.default in (None, False, ()) or text.endswith(")")
    return text if shown else f"{text} (default: {field.default})"


def _argument_type(kind: Any) -> dict[str, Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(a for a in typing.get_args(kind) if a is not type(None))
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        return {"choices": choices, "type": type(choices[0])}
    if origin is tuple:
        return {"nargs": "+", "type": typing.get_args(kind)[0], "action": _Several}
    if kind is bool:
        return {"action": "store_true"}
    return {"type": kind}
