"""A service that embeds the runtime installs neither torch nor transformers nor onnx."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headport.runtime import Generator

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("isolated.py")


def run(python: Path | str, *words: Path | str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [python, *words], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(output: str, bundle: Path) -> dict:
    found = json.loads(output)
    [expected] = Generator(bundle, threads=1).generate(
        "a b", max_new_tokens=8, temperature=1.0, seed=3
    )
    assert found["token_ids"][0] == found["streamed"] == expected.token_ids
    assert found["served"] == expected.token_ids
    assert found["code"] == 0 and found["heavy"] == []
    return found


@pytest.mark.parametrize("bundle", ["tiny_bundle", "tiny_lowered"])
def test_nothing_heavy_is_imported(bundle, request):
    path = request.getfixturevalue(bundle)
    check(run(sys.executable, PROGRAM, path, "--block"), path)


def test_the_blocker_blocks(tmp_path):
    program = "import sys; sys.path.insert(0, sys.argv[1]); import isolated; "
    program += "sys.meta_path.insert(0, isolated.Refuse()); import torch"
    with pytest.raises(AssertionError, match="torch was imported by a runtime"):
        run(sys.executable, "-c", program, PROGRAM.parent)


def test_the_wheel_runs_in_a_venv_without_them(tiny_bundle, tmp_path):
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT)
    [wheel] = tmp_path.glob("headport-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    inside = (*pip, "--python", python)
    constraints = ROOT / "constraints.txt"
    pins = ["-c", constraints] if constraints.is_file() else []
    try:
        run(*inside, "install", "--no-compile", *pins, f"headport[cpu,serve] @ {wheel.as_uri()}")
    except AssertionError as error:
        if "Could not find a version" in str(error) or "Retrying" in str(error):
            pytest.skip("no package index can be reached")
        raise
    installed = run(*inside, "list", "--format", "freeze")
    for name in ("torch", "transformers", "onnx", "onnx-ir", "onnxscript"):
        assert f"\n{name}==" not in f"\n{installed}"
    found = check(run(python, PROGRAM, tiny_bundle), tiny_bundle)
    assert found["headport"].startswith(str(tmp_path))  # the wheel's, not the tree's
