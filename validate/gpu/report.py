"""The report of `gpu-check`: what each step found, and what all of them together prove."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

__all__ = ["GPU_REPORT_SCHEMA_VERSION", "GpuReport", "Status", "StepRecord", "Verdict", "decide"]

GPU_REPORT_SCHEMA_VERSION: Final = 1

# proved: a limit was held. measured: figures without a limit. unproven: not run, for a reason.
Status = Literal["proved", "measured", "failed", "unproven"]
Verdict = Literal["passed", "failed", "unproven"]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step: what it found, in a sentence and in figures."""

    name: str
    status: Status
    text: str
    figures: dict[str, Any] = {}
    seconds: float = 0.0


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """All steps, and where they ran."""

    schema_version: int
    verdict: Verdict
    date: str
    headport: str
    bundle: str
    manifest_sha256: str
    target: str
    dtype: str
    heads: dict[str, str]
    gpus: tuple[str, ...]
    driver: str | None  # newest CUDA version it serves
    machine: str
    versions: dict[str, str]
    provider: str
    provider_options: dict[str, str]
    cpu_fallback: bool  # operators the provider lacks were let onto the CPU
    steps: tuple[StepRecord, ...]

    def __bool__(self) -> bool:
        return self.verdict == "passed"


def decide(steps: Iterable[StepRecord]) -> Verdict:
    """`failed` if a step failed; `passed` only if something was proved besides."""
    found = {step.status for step in steps}
    if "failed" in found:
        return "failed"
    return "passed" if "proved" in found else "unproven"
