"""Threads as `headport tune` chose them: on the kind of machine that they were measured on.

A record counts where the CPU's model and the number of usable CPUs are the recorded ones. Anywhere
else, and where the caller names a number, it is as if there were none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from headport.machine import cpu_model, usable_cpus
from headport.manifest import Manifest, Tuning
from headport.progress import say
from headport.session import SessionSettings

__all__ = [
    "THREADS_HELP",
    "applies_here",
    "machine_text",
    "settings_of",
    "threads_text",
]

# As an option of every verb that runs a bundle for its answers.
THREADS_HELP = "ONNX Runtime threads; 0 = as the bundle records for this machine, else all cores"


def applies_here(record: Tuning) -> bool:
    """Whether this machine is of the kind that a record was measured on."""
    return (record.cpu, record.cpus) == (cpu_model(), usable_cpus())


def settings_of(manifest: Manifest, settings: SessionSettings | None = None) -> SessionSettings:
    """How to open a bundle: the provider by name, and the recorded threads where none are given.

    Where a bundle has records and none is for this machine, the terminal says so once.

    Raises:
        UsageError: If there is no provider of that name.
    """
    chosen = (settings or SessionSettings()).for_target(manifest.target)
    if chosen.threads or not manifest.tuned:
        return chosen
    found = next(filter(applies_here, manifest.tuned), None)
    if found is None:
        _say_once(_elsewhere(manifest))
        return chosen
    return replace(chosen, threads=found.threads, spinning=found.spinning)


def threads_text(threads: int, spinning: bool) -> str:
    """Threads in words."""
    if threads == 1:
        return "1 thread"
    return f"{threads} threads, {'spinning' if spinning else 'not spinning'}"


def machine_text(cpus: int, cpu: str) -> str:
    """A kind of machine in words."""
    return f"{cpus} CPU{'' if cpus == 1 else 's'} of {cpu or 'no known model'}"


def _elsewhere(manifest: Manifest) -> str:
    known = "; ".join(machine_text(each.cpus, each.cpu) for each in manifest.tuned)
    here = machine_text(usable_cpus(), cpu_model())
    return (
        f"the bundle's threads were measured on {known}; this process has {here} and takes one "
        "thread per CPU; measure them here with `headport tune`"
    )


@cache
def _say_once(text: str) -> None:
    say(text)
