"""`headport build`: run the stages of a recipe, each on the verified output of the one before."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headport.bundle import Bundle, check_output
from headport.command import OptionRecord, Outcome, option, positional
from headport.progress import say
from headport.recipe import read_recipe

__all__ = ["SUMMARY", "Options", "build", "run"]

SUMMARY = "Run the stages of a recipe, from a checkpoint to plans."


class Options(OptionRecord, frozen=True):
    """Options of `headport build`."""

    model: Annotated[str, positional("Hugging Face folder, .gguf file, or module:function")]
    recipe: Annotated[Path, option("recipe file (TOML)", metavar="FILE")]
    output: Annotated[Path, option("bundle to write", flag="-o", metavar="BUNDLE")]
    trust_remote_code: Annotated[bool, option("as for export")] = False
    allow_pickle: Annotated[bool, option("as for export")] = False
    adapter: Annotated[Path | None, option("as for export", metavar="FOLDER")] = None
    condition: Annotated[Path | None, option("as for export", metavar="FILE")] = None
    force: Annotated[bool, option("replace an existing bundle")] = False


def build(options: Options) -> Bundle:
    """Run a recipe; the bundles between stages are removed, only the last one stays.

    Raises:
        UsageError: If the recipe is wrong; found before the first stage starts.
        OutputError: If the output exists and `force` is False.
    """
    recipe = read_recipe(options.recipe)
    check_output(options.output, force=options.force)
    options.output.absolute().parent.mkdir(parents=True, exist_ok=True)
    # runtime/engine/plan.py knows bundles of this folder by its name.
    work = Path(tempfile.mkdtemp(prefix=".build.", dir=options.output.absolute().parent))
    try:
        source: Any = options.model
        for stage in recipe.stages:
            last = stage is recipe.stages[-1]
            target = options.output if last else work / stage.name
            say(f"{stage.name} …")
            chosen = stage.options(recipe.sections[stage.name], source, target, recipe.where)
            chosen = msgspec.structs.replace(chosen, force=options.force and last)
            if stage.name == "export":
                chosen = msgspec.structs.replace(
                    chosen,
                    trust_remote_code=options.trust_remote_code,
                    allow_pickle=options.allow_pickle,
                    adapter=options.adapter,
                    condition=options.condition,
                )
            bundle = stage.run(chosen)
            source = bundle.path
        return bundle
    finally:
        shutil.rmtree(work, ignore_errors=True)


def run(options: Options) -> Outcome:
    """Build and say what came out."""
    from headport.inspection import describe

    description = describe(build(options))
    return Outcome(description.text(), description)
