"""`headport doctor`: does this machine have what headport needs, and is it in order?"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from headport import __version__
from headport.command import OptionRecord, Outcome
from headport.errors import UsageError
from headport.gpu_probe import probe_gpu
from headport.kernels import OPTION, VARIABLE, VERSION, needed_kernels
from headport.machine import cpu_features, cpu_model, physical_cores, usable_cpus
from headport.providers import PROVIDERS
from headport.session import available_providers, check_kernels, missing_libraries

__all__ = ["SUMMARY", "Check", "Diagnosis", "Options", "diagnose", "run"]

SUMMARY = "Check the installation of this machine."

_PACKAGES = (
    *("numpy", "onnxruntime", "onnxruntime-gpu", "tokenizers", "torch", "transformers"),
    *("onnx", "onnx-ir", "onnxscript", "tensorrt", "tensorrt-rtx-cu12"),
)
_BUILDS = ("onnxruntime", "onnxruntime-gpu")  # of one package folder


class Options(OptionRecord, frozen=True):
    """`headport doctor` has no options of its own."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing looked at."""

    name: str
    passed: bool
    found: str
    advice: str | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What `doctor` reports."""

    headport: str
    python: str
    machine: str
    cpu: str  # its model, as `headport tune` records it
    cpus: int  # that this process may use
    physical_cores: int  # behind them
    cpu_features: tuple[str, ...]
    packages: dict[str, str | None]  # None: not installed
    providers: tuple[str, ...]  # what the build knows, not what works
    checks: tuple[Check, ...]

    def __bool__(self) -> bool:
        return all(check.passed for check in self.checks)

    def text(self) -> str:
        """The diagnosis as lines for a terminal."""
        installed = ", ".join(f"{n} {v}" for n, v in self.packages.items() if v)
        absent = ", ".join(name for name, version in self.packages.items() if version is None)
        lines = [
            f"headport {self.headport}, Python {self.python}, {self.machine}",
            f"{self.cpus} CPUs of {self.physical_cores} cores, {self.cpu or 'of no known model'}; "
            f"{', '.join(self.cpu_features) or 'no known vector features'}",
            f"installed: {installed}",
            f"absent: {absent or 'none'}",
            f"providers of this ONNX Runtime build: {', '.join(self.providers) or 'none'}",
        ]
        for check in self.checks:
            lines.append(f"[{'ok' if check.passed else 'FAIL'}] {check.name}: {check.found}")
            if check.advice and not check.passed:
                lines.append(f"       {check.advice}")
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Look at packages, providers and CPU."""
    packages = {name: _version(name) for name in _PACKAGES}
    checks = [
        _one_onnxruntime(packages),
        _onnxruntime_library(packages),
        _export_packages(packages),
    ]
    try:
        providers = available_providers()
        checks.append(Check(name="onnxruntime loads", passed=True, found=", ".join(providers)))
    except UsageError as error:
        providers = ()
        checks.append(Check(name="onnxruntime loads", passed=False, found=str(error)))
    if os.environ.get(VARIABLE):
        checks.append(_kernels())
    if PROVIDERS["cuda"].name in providers:
        checks += [_driver(), _cuda_libraries()]
    return Diagnosis(
        headport=__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        cpu=cpu_model(),
        cpus=usable_cpus(),
        physical_cores=physical_cores(),
        cpu_features=cpu_features(),
        packages=packages,
        providers=providers,
        checks=tuple(checks),
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _one_onnxruntime(packages: dict[str, str | None]) -> Check:
    both = [name for name in _BUILDS if packages[name]]
    return Check(
        name="one build of ONNX Runtime",
        passed=len(both) == 1,
        found=" and ".join(both) or "none installed",
        advice="onnxruntime and onnxruntime-gpu share one folder and overwrite each other: "
        "uninstall both, then install headport[cpu] or headport[gpu]",
    )


def _onnxruntime_library(packages: dict[str, str | None]) -> Check:
    spec = importlib.util.find_spec("onnxruntime")
    folder = Path(spec.origin).parent / "capi" if spec and spec.origin else None
    found = sorted(p.name for p in folder.glob("libonnxruntime.so.*")) if folder else []
    # macOS and Windows name the library otherwise; only leftovers of a second build matter there.
    expected = any(packages[name] for name in _BUILDS) and sys.platform == "linux"
    return Check(
        name="one ONNX Runtime library in the package",
        passed=len(found) == 1 if expected else len(found) <= 1,
        found=", ".join(found) or ("none" if expected else "not a Linux wheel, not checked"),
        advice="one of two builds was installed over the other, or removed after it; "
        "pip uninstall -y onnxruntime onnxruntime-gpu, then install one of them again",
    )


def _kernels() -> Check:
    name = f"headport's kernels ({VARIABLE})"
    try:
        found = needed_kernels({OPTION: str(VERSION)})
        assert found is not None
        check_kernels(found)
    except UsageError as error:
        return Check(name=name, passed=False, found=str(error))
    return Check(name=name, passed=True, found=f"version {found.version}, {found.instructions}")


def _driver() -> Check:
    probe = probe_gpu()
    cards = ", ".join(f"{gpu.name} ({gpu.compute_capability})" for gpu in probe.gpus)
    return Check(
        name="NVIDIA driver",
        passed=bool(probe),
        found=f"{cards}; it serves CUDA {probe.driver}" if probe else str(probe.fault),
        advice="this ONNX Runtime build is for NVIDIA GPUs: install their driver, or use "
        "headport[cpu]",
    )


def _cuda_libraries() -> Check:
    provider = PROVIDERS["cuda"]
    missing = missing_libraries(provider)
    # The driver's own library is the check before this one.
    missing = {name: source for name, source in missing.items() if "driver" not in source}
    return Check(
        name="CUDA libraries",
        passed=not missing,
        found=f"missing {', '.join(missing)}" if missing else f"{provider.library} finds all",
        advice="; ".join(f"{name}: {source}" for name, source in missing.items()) or None,
    )


def _export_packages(packages: dict[str, Any]) -> Check:
    needed = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript")
    missing = [name for name in needed if packages[name] is None]
    # A runtime-only installation is fine, half an export installation is not.
    half = 0 < len(missing) < len(needed)
    found = f"missing {', '.join(missing)}" if missing else "complete"
    if len(missing) == len(needed):
        found = "not installed (runtime only)"
    return Check(
        name="export packages",
        passed=not half,
        found=found,
        advice="pip install 'headport[export]'",
    )


def run(options: Options) -> Outcome:  # noqa: ARG001 - a verb's signature
    """Diagnose and print; exit 1 if a check failed."""
    diagnosis = diagnose()
    return Outcome(diagnosis.text(), diagnosis, 0 if diagnosis else 1)
