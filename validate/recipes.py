"""What `headport sweep` found, for a report that shows it beside its own figures."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headport.errors import UsageError
from headport.validate.report import Report

__all__ = ["RecipeSweep", "RecipeTrial", "check_same_model", "read_sweep"]


class RecipeTrial(msgspec.Struct, frozen=True):
    """One recipe for the head; see `headport.quantize.trial.Trial`."""

    recipe: str
    stored_bytes: int
    read_bytes: int
    kl_mean: float
    perplexity_ratio: float
    top1_agreement: float
    step_ms: float


class RecipeSweep(msgspec.Struct, frozen=True):
    """All recipes, and those that no other beats in bytes, KL and step at once."""

    checkpoint: str
    positions: int
    trials: tuple[RecipeTrial, ...]
    pareto: tuple[str, ...]


def read_sweep(file: Path) -> RecipeSweep:
    """Read what `headport sweep --report FILE.json` wrote.

    Raises:
        UsageError: If the file is missing, cut short, or something else.
    """
    how = "write it with `headport sweep … --report FILE.json`"
    try:
        found = msgspec.json.decode(file.read_bytes(), type=RecipeSweep)
    except OSError as error:
        raise UsageError(f"--sweep {file}: a sweep was expected: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--sweep {file}: no sweep of recipes ({error}); {how}") from error
    if not found.trials:
        raise UsageError(f"--sweep {file}: at least one recipe was expected, none found; {how}")
    return found


def check_same_model(sweep: RecipeSweep, report: Report) -> None:
    """Refuse recipes for another model than the report's.

    Raises:
        UsageError: If the checkpoints have different names.
    """
    if sweep.checkpoint != report.candidate.checkpoint:
        raise UsageError(
            f"--sweep: recipes for {report.candidate.checkpoint} were expected, of which the "
            f"report is, those of {sweep.checkpoint} were found"
        )
