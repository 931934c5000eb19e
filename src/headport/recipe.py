"""Recipes: the stages of a build and their options, as a TOML file.

    [export]
    dtype = "fp32"

    [quantize]
    head = "int8"

    [lower]
    target = "ort-cpu"

A section is a stage, its keys are the stage's options; a missing section skips the stage, except
`export`, which every build begins with. Paths are given on the command line, never in a recipe.
"""

from __future__ import annotations

import importlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headport.bundle import Bundle
from headport.command import OptionRecord, record_from_mapping
from headport.errors import UsageError

__all__ = ["STAGES", "Recipe", "StageSpec", "read_recipe"]

# What lets foreign code run is the user's decision, never that of a file he was given.
_TRUST = ("trust_remote_code", "allow_pickle", "kernels")
_TUNED = "ort-cpu"  # the target whose bundles are tuned
_FILES = ("adapter", "condition", "timing_cache")


@dataclass(frozen=True)
class StageSpec:
    """One stage: its recipe section, its module, its function and the name of its input option."""

    name: str
    module: str
    function: str
    source: str

    def options(self, keys: dict[str, Any], source: Any, output: Path, where: str) -> OptionRecord:
        """The stage's option record.

        Raises:
            UsageError: If a key is unknown, reserved for the command line, or ill-typed.
        """
        reserved = sorted({self.source, *_FILES, *_TRUST, "output", "force"} & keys.keys())
        if "kernels" in reserved:
            raise UsageError(
                f"{where}, [{self.name}]: a library cannot be named in a recipe, which would run "
                "its code; build without it, then `headport lower --kernels`"
            )
        if reserved:
            raise UsageError(
                f"{where}, [{self.name}]: {', '.join(reserved)} belongs on the command line"
            )
        record = importlib.import_module(self.module).Options
        values = {**keys, self.source: source, "output": output}
        found: OptionRecord = record_from_mapping(record, values, f"{where}, [{self.name}]")
        return found

    def check(self, options: OptionRecord) -> None:
        """Refuse options that contradict each other, where the stage's module can tell.

        Raises:
            UsageError: If they do.
        """
        check = getattr(importlib.import_module(self.module), "check", None)
        if check is not None:
            check(options)

    def run(self, options: OptionRecord) -> Bundle:
        """Run the stage."""
        found: Bundle = getattr(importlib.import_module(self.module), self.function)(options)
        return found


STAGES = (
    StageSpec("export", "headport.export.command", "export", "model"),
    StageSpec("prune", "headport.quantize.prune.command", "prune", "bundle"),
    StageSpec("quantize", "headport.quantize.command", "quantize", "bundle"),
    StageSpec("lower", "headport.lowering.command", "lower", "bundle"),
    StageSpec("tune", "headport.runtime.tuning.command", "tune", "bundle"),
    StageSpec("engine", "headport.runtime.engine.command", "engine", "bundle"),
)


@dataclass(frozen=True)
class Recipe:
    """The sections of a recipe file, in the order of `STAGES`."""

    where: str
    sections: dict[str, dict[str, Any]]

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages to run, in order."""
        return tuple(stage for stage in STAGES if stage.name in self.sections)


def read_recipe(file: Path) -> Recipe:
    """Read a recipe and check every section and key before anything runs.

    Raises:
        UsageError: If the file is missing, not TOML, or has unknown sections, keys or values.
    """
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: the recipe cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not valid TOML ({error})") from error
    known = [stage.name for stage in STAGES]
    unknown = sorted(found.keys() - set(known))
    if unknown:
        raise UsageError(
            f"{file}: unknown section or key {', '.join(unknown)}; sections are {', '.join(known)}"
        )
    loose = sorted(name for name, keys in found.items() if not isinstance(keys, dict))
    if loose:
        raise UsageError(f"{file}: {', '.join(loose)} must be a section, as in [{loose[0]}]")
    if "tune" in found and found.get("lower", {}).get("target") != _TUNED:
        raise UsageError(
            f"{file}, [tune]: it measures bundles lowered to {_TUNED}; a section [lower] with "
            f'target = "{_TUNED}" was expected'
        )
    recipe = Recipe(str(file), {"export": {}} | found)
    for stage in recipe.stages:
        placeholder = "" if stage.source == "model" else Path()
        stage.check(stage.options(recipe.sections[stage.name], placeholder, Path(), str(file)))
    return recipe
