"""Running a table of steps: skipped ones, ones that need another, and ones that break."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headport.errors import HeadportError, UsageError
from headport.progress import say
from headport.validate.gpu.report import StepRecord

__all__ = ["Context", "Finding", "Step", "Unproven", "run_steps"]


class Unproven(Exception):  # noqa: N818 - not an error: what a step asks for is not there
    """A step cannot run here; its message says what is missing."""


@dataclass(frozen=True)
class Finding:
    """What a step found; `proved` and `failed` where it has a limit, else `measured`."""

    status: Literal["proved", "measured", "failed"]
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Context:
    """What steps are given, and what they hand on to each other."""

    options: Any
    bundle: Any
    settings: Any  # how the bundle runs on the GPU
    found: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One row of the table."""

    name: str
    what: str  # in a few words
    run: Callable[[Context], Finding]
    needs: tuple[str, ...] = ()


def run_steps(
    steps: Sequence[Step],
    context: Context,
    skip: Collection[str],
    after: Callable[[tuple[StepRecord, ...]], None] | None = None,
) -> tuple[StepRecord, ...]:
    """Run the steps in order; one that breaks fails, and the next one still runs.

    Args:
        steps: The table.
        context: Handed to each.
        skip: Names of steps to leave out.
        after: Told the records so far after each step, as a crash of a driver ends the process.

    Raises:
        UsageError: If `skip` names no step.
    """
    known = [step.name for step in steps]
    odd = sorted(set(skip) - set(known))
    if odd:
        raise UsageError(f"--skip {', '.join(odd)}: steps are {', '.join(known)}")
    records: list[StepRecord] = []
    for step in steps:
        say(f"{step.name}: {step.what} …")
        started = time.perf_counter()
        record = _record(step, context, skip, records)
        seconds = round(time.perf_counter() - started, 3)
        records.append(_with_seconds(record, seconds))
        if after is not None:
            after(tuple(records))
    return tuple(records)


def _with_seconds(record: StepRecord, seconds: float) -> StepRecord:
    return StepRecord(
        name=record.name,
        status=record.status,
        text=record.text,
        figures=record.figures,
        seconds=seconds,
    )


def _record(
    step: Step, context: Context, skip: Collection[str], before: Sequence[StepRecord]
) -> StepRecord:
    if step.name in skip:
        return StepRecord(name=step.name, status="unproven", text="left out by --skip")
    status = {record.name: record.status for record in before}
    for need in step.needs:
        if status[need] not in ("proved", "measured"):
            text = f"needs the step {need}, which is {status[need]}"
            return StepRecord(name=step.name, status="unproven", text=text)
    try:
        found = step.run(context)
    except Unproven as reason:
        return StepRecord(name=step.name, status="unproven", text=str(reason))
    except HeadportError as error:
        return StepRecord(name=step.name, status="failed", text=str(error))
    except Exception as error:  # noqa: BLE001 - a kernel may raise anything; other steps still count
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        text = f"{type(error).__name__}: {first[:300]}"
        return StepRecord(name=step.name, status="failed", text=text)
    return StepRecord(name=step.name, status=found.status, text=found.text, figures=found.figures)
