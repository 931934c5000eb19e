"""The wheel holds the real files of the four rooms, also when built from the sdist."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that `python -m build` makes from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_holds_every_module_of_the_tree(wheel: zipfile.ZipFile) -> None:
    rooms = ("export", "quantize", "runtime", "validate")
    expected = {
        f"headport/{path.relative_to(ROOT)}"
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
    }
    source = ROOT / "src" / "headport"
    expected |= {
        f"headport/{path.relative_to(source)}"
        for path in source.rglob("*.py")
        if path.relative_to(source).parts[0] not in rooms
    }
    modules = {name for name in wheel.namelist() if name.endswith(".py")}
    assert modules == expected


def test_the_wheel_holds_its_specifications_and_the_licence(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "headport/validate/report.schema.json" in names
    assert "headport/runtime/SAMPLING.md" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_holds_no_tests_or_benchmarks(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"headport"}
