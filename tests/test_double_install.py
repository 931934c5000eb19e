"""Both builds of ONNX Runtime in one real environment: `make test-gpu-install` fetches them.

HEADPORT_GPU_INSTALL is a folder with an environment `venv`, without ONNX Runtime, and `wheels`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLACE = Path(os.environ.get("HEADPORT_GPU_INSTALL", ""))
WHEELS = PLACE / "wheels"
CPU, GPU = "onnxruntime", "onnxruntime-gpu"

pytestmark = pytest.mark.skipif(
    "HEADPORT_GPU_INSTALL" not in os.environ,
    reason="both builds of ONNX Runtime are not here; run `make test-gpu-install`",
)
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def run() -> Run:
    """`python -m …` in the environment: exit code, and all it says."""
    python = (PLACE / "venv" / "bin" / "python").absolute()

    def call(*words: str | Path) -> tuple[int, str]:
        done = subprocess.run(
            [python, "-m", *map(str, words)],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    call("pip", "uninstall", "--yes", CPU, GPU)
    return call


def install(run: Run, *names: str) -> None:
    for name in names:
        [wheel] = WHEELS.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
        code, said = run("pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
        assert code == 0, said


def test_one_after_the_other(run: Run) -> None:
    install(run, CPU)
    code, said = run("headport", "doctor")
    assert code == 0 and "FAIL" not in said, said
    install(run, GPU)
    code, said = run("headport", "doctor")
    assert code == 1, said
    assert f"[FAIL] one build of ONNX Runtime: {CPU} and {GPU}" in said
    assert "[FAIL] one ONNX Runtime library in the package: libonnxruntime.so.1.31.1, " in said
    assert "uninstall both, then install headport[cpu] or headport[gpu]" in said
    run("pip", "uninstall", "--yes", GPU)
    code, said = run("headport", "doctor")
    assert code == 1 and "onnxruntime package is hollow" in said, said
    assert "[FAIL] one ONNX Runtime library in the package: none" in said


def test_a_build_for_gpus_where_there_is_none(run: Run, tiny_bundle: Path) -> None:
    run("pip", "uninstall", "--yes", CPU, GPU)
    install(run, GPU)
    code, said = run("headport", "doctor")
    assert code == 1 and f"[ok] one build of ONNX Runtime: {GPU}" in said, said
    assert "[FAIL] NVIDIA driver: libcuda.so.1 cannot be loaded" in said
    assert "libcublas.so.13: pip install nvidia-cublas" in said
    words = ("headport", "generate", tiny_bundle, "-p", "The head", "--max-new-tokens", "2")
    code, said = run(*words, "--provider", "cuda")
    assert code == 2, said
    assert "provider CUDAExecutionProvider needs a GPU: libcuda.so.1 cannot be loaded" in said
    assert said.count("\n") == 1 and "Traceback" not in said
    code, said = run(*words, "--provider", "cuda", "--cpu-fallback")
    assert code == 0 and "everything runs on the CPU instead (--cpu-fallback)" in said, said
    code, said = run(*words)
    assert code == 0 and "CUDA" not in said, said
