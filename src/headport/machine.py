"""The CPUs of this machine: what decides how fast sessions run, and which kernels they take."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from pathlib import Path

__all__ = ["cpu_features", "cpu_model", "physical_cores", "usable_cpus"]

_CPUINFO = Path("/proc/cpuinfo")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CPUS = Path("/sys/devices/system/cpu")
# A virtual machine may call many kinds of CPU by one name; these numbers tell them apart. The same
# fields in the same form as in runtime/cpp/src/ort/cpus.cc.
_NAME = "model name"
_NUMBERS = ("cpu family", "model", "CPU implementer", "CPU part")
# What decides which INT8 kernel runs, and so both speed and rounding.
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")


def usable_cpus() -> int:
    """CPUs this process may use.

    Containers often allow fewer than the machine has, by affinity or by a quota of the control
    group; spinning threads beyond them hurt.
    """
    allowed = len(_allowed())
    return max(1, min(allowed, _cpu_quota(_CGROUP_QUOTA) or allowed))


def physical_cores() -> int:
    """Cores behind those CPUs: fewer where two CPUs are the threads of one; else as many."""
    try:
        places = {_core(_CPUS / f"cpu{number}" / "topology") for number in _allowed()}
    except OSError:
        return usable_cpus()
    return min(len(places), usable_cpus())


def cpu_model() -> str:
    """What kind of CPU this is, as the operating system names it; empty where it does not."""
    return _model(_CPUINFO)


def cpu_features() -> tuple[str, ...]:
    """Its instructions that decide which kernels run; none where the system does not tell."""
    if sys.platform != "linux" or not _CPUINFO.is_file():
        return ()
    words = set(_CPUINFO.read_text(encoding="utf-8", errors="replace").split())
    return tuple(name for name in _FEATURES if name in words)


@cache
def _model(file: Path) -> str:
    if not file.is_file():
        return platform.processor() if sys.platform == "win32" else ""
    first = file.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    found = {name.strip(): value.strip() for name, _, value in pairs}
    numbers = ", ".join(f"{name} {found[name]}" for name in _NUMBERS if found.get(name))
    name = found.get(_NAME, "")
    return f"{name} ({numbers})" if name and numbers else name or numbers


def _allowed() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _core(folder: Path) -> tuple[str, str]:
    package, core = ((folder / name).read_text() for name in ("physical_package_id", "core_id"))
    return package, core


def _cpu_quota(file: Path) -> int | None:
    # "200000 100000": microseconds of CPU time in each period of microseconds; "max" is no quota.
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None
