"""A recipe is checked whole before its first stage runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from headport.errors import UsageError
from headport.recipe import read_recipe

ROOT = Path(__file__).resolve().parent.parent


def _recipe(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    return file


def test_stages_run_in_the_order_of_the_table_not_of_the_file(tmp_path: Path) -> None:
    text = "[lower]\ntarget = 'ort-cpu'\n[quantize]\nhead = 'int8'\n"
    names = [stage.name for stage in read_recipe(_recipe(tmp_path, text)).stages]
    assert names == ["export", "quantize", "lower"]
    tuned = read_recipe(_recipe(tmp_path, "[tune]\nthreads = [1]\n" + text)).stages
    assert [stage.name for stage in tuned] == [*names, "tune"]


@pytest.mark.parametrize("name", ["int8.toml", "fp32.toml"])
def test_the_recipes_we_ship_are_valid(name: str) -> None:
    assert read_recipe(ROOT / "examples" / "recipes" / name).stages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[quantise]\nhead = 'int8'", "unknown section or key quantise; sections are export"),
        ("head = 'int8'", "unknown section or key head"),
        ("export = 1", "export must be a section"),
        ("[quantize]\nheads = 'int8'", r"\[quantize\].*heads"),
        ("[quantize]\nhead = 'int9'", r"\[quantize\].*int9"),
        ("[quantize]\nhead = 'int8'\nblock = '64'", r"\[quantize\].*block"),
        ("[lower]\ntarget = 'gpu'", r"\[lower\].*gpu"),
        ("[tune]", r"\[tune\]: .*ort-cpu; a section \[lower\]"),
        ("[lower]\ntarget = 'tensorrt'\n[tune]", r"\[tune\]: .*ort-cpu"),
        ("[lower]\ntarget = 'ort-cpu'\n[tune]\nrounds = 0", "rounds: at least 1 expected, 0 given"),
        ("[export]\noutput = 'x'", "output belongs on the command line"),
        ("[export]\nmodel = 'x'", "model belongs on the command line"),
        ("[export]\ntrust_remote_code = true", "trust_remote_code belongs on the command line"),
        ("[export]\nallow_pickle = true", "allow_pickle belongs on the command line"),
        ("[lower]\ntarget = 'ort-cpu'\nkernels = 'x.so'", "library cannot be named in a recipe"),
        ("[export", "not valid TOML"),
    ],
)
def test_wrong_recipes_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_recipe(_recipe(tmp_path, text))


def test_a_missing_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_recipe(tmp_path / "none.toml")
