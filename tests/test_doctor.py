"""The doctor finds what breaks an installation."""

from __future__ import annotations

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
    check = doctor._onnxruntime_library()
    assert not check.passed
    assert "1.31.1" in check.found
    assert "1.32.0" in check.found


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
