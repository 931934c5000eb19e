"""What the operating system says of its CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from headport import machine

X86 = (
    "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2\n"
)
ARM = "processor\t: 0\nFeatures\t: asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (X86, "AMD EPYC (cpu family 25, model 1)"),
        (X86 + "\n" + X86.replace("EPYC", "other"), "AMD EPYC (cpu family 25, model 1)"),
        (X86.replace("model\t\t: 1", "model\t\t: 17"), "AMD EPYC (cpu family 25, model 17)"),
        (ARM, "CPU implementer 0x41, CPU part 0xd40"),
        ("model name\t: ARMv7 Processor\n", "ARMv7 Processor"),
        ("processor\t: 0\n", ""),
    ],
)
def test_the_model_of_a_cpu(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert machine._model(tmp_path / "cpuinfo") == expected


def test_instructions_are_whole_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(X86.replace("avx2", "avx2 avx512fp16"))
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    assert machine.cpu_features() == ("avx2",)
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "none")
    assert machine.cpu_features() == ()


def test_threads_of_one_core_are_told_from_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    monkeypatch.setattr(machine, "_CGROUP_QUOTA", tmp_path / "none")
    monkeypatch.setattr(machine, "_allowed", lambda: [0, 1, 4, 5])
    assert machine.physical_cores() == 4  # the system does not tell
    for number, place in {0: "0 0", 1: "0 1", 4: "0 0", 5: "1 1"}.items():
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        for name, value in zip(("physical_package_id", "core_id"), place.split(), strict=True):
            (folder / name).write_text(value)
    assert machine.physical_cores() == 3
    (tmp_path / "cpu.max").write_text("200000 100000")
    monkeypatch.setattr(machine, "_CGROUP_QUOTA", tmp_path / "cpu.max")
    assert machine.physical_cores() == machine.usable_cpus() == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000\n", None), ("200000 100000\n", 2), ("150000 100000\n", 2), ("", None)],
)
def test_quota_of_a_control_group(tmp_path: Path, text: str, expected: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert machine._cpu_quota(tmp_path / "cpu.max") == expected
    assert machine._cpu_quota(tmp_path / "missing") is None


def test_threads_follow_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000")
    monkeypatch.setattr(machine, "_CGROUP_QUOTA", tmp_path / "cpu.max")
    assert machine.usable_cpus() == 1
    monkeypatch.setattr(machine, "_CGROUP_QUOTA", tmp_path / "none")
    assert machine.usable_cpus() >= 1
