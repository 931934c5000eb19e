"""The doctor finds what breaks an installation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headport import doctor
from headport.gpu_probe import Gpu, GpuProbe


def test_this_machine_is_in_order() -> None:
    found = doctor.diagnose()
    assert found, found.text()
    assert found.packages["onnxruntime"] is not None
    assert "CPUExecutionProvider" in found.providers


def test_two_builds_of_onnxruntime_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0")
    found = doctor.diagnose()
    assert not found
    assert "[FAIL] one build of ONNX Runtime: onnxruntime and onnxruntime-gpu" in found.text()


def test_a_leftover_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "capi").mkdir()
    for version in ("1.31.1", "1.32.0"):
        (tmp_path / "capi" / f"libonnxruntime.so.{version}").touch()
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: spec)
    packages = {"onnxruntime": "1.32.0", "onnxruntime-gpu": None}
    check = doctor._onnxruntime_library(packages)
    assert not check.passed
    assert "1.31.1" in check.found
    assert "1.32.0" in check.found
    for file in (tmp_path / "capi").iterdir():
        file.unlink()
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    hollow = doctor._onnxruntime_library(packages)
    assert (hollow.passed, hollow.found) == (False, "none")
    monkeypatch.setattr(doctor.sys, "platform", "win32")
    assert doctor._onnxruntime_library(packages).passed


def test_half_an_export_installation_is_found() -> None:
    packages = dict.fromkeys(("torch", "transformers", "onnx", "onnx-ir", "onnxscript"), "1")
    assert doctor._export_packages(packages).passed
    assert not doctor._export_packages(packages | {"torch": None}).passed
    assert doctor._export_packages(dict.fromkeys(packages)).passed


def test_missing_cuda_libraries_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_providers", lambda: ("CUDAExecutionProvider",))
    monkeypatch.setattr(doctor, "probe_gpu", lambda: GpuProbe(None, (), "there is no driver"))
    missing = {
        "libcublas.so.13": "pip install nvidia-cublas",
        "libcuda.so.1": "the NVIDIA driver",
    }
    monkeypatch.setattr(doctor, "missing_libraries", lambda provider: missing)
    found = doctor.diagnose()
    assert not found
    text = found.text()
    assert "[FAIL] NVIDIA driver: there is no driver" in text
    assert "[FAIL] CUDA libraries: missing libcublas.so.13\n" in text
    assert "libcublas.so.13: pip install nvidia-cublas" in text
    monkeypatch.setattr(doctor, "missing_libraries", lambda provider: {})
    gpu = Gpu(name="Card", compute_capability="9.0", memory_bytes=1)
    monkeypatch.setattr(doctor, "probe_gpu", lambda: GpuProbe("13.0", (gpu,), None))
    assert "[ok] NVIDIA driver: Card (9.0); it serves CUDA 13.0" in doctor.diagnose().text()


def test_two_builds_beside_each_other(tmp_path: Path) -> None:
    """As pip leaves them: two distributions, one folder with the libraries of both."""
    for name, version in (("onnxruntime", "1.32.0"), ("onnxruntime_gpu", "1.31.1")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
        capi = tmp_path / "onnxruntime" / "capi"
        capi.mkdir(parents=True, exist_ok=True)
        (capi / f"libonnxruntime.so.{version}").touch()
    (tmp_path / "onnxruntime" / "__init__.py").touch()  # hollow, as after pip uninstall
    found = subprocess.run(
        [sys.executable, "-m", "headport", "doctor"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1, found.stdout + found.stderr
    assert "[FAIL] one build of ONNX Runtime: onnxruntime and onnxruntime-gpu" in found.stdout
    assert "uninstall both, then install headport[cpu] or headport[gpu]" in found.stdout
    assert (
        "[FAIL] one ONNX Runtime library in the package: "
        "libonnxruntime.so.1.31.1, libonnxruntime.so.1.32.0" in found.stdout
    )
    assert "[FAIL] onnxruntime loads: the onnxruntime package is hollow" in found.stdout
    assert "Traceback" not in found.stderr
