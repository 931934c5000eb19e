"""The doctor finds what breaks an installation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from headport import doctor


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
