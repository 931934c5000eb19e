"""A model repository: folders of models, each with its configuration and numbered versions.

REPOSITORY/NAME/config.pbtxt
REPOSITORY/NAME/1/…
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headport.bundle import MANIFEST
from headport.errors import OutputError
from headport.runtime.triton.model_config import CONFIG

__all__ = ["ModelFiles", "write_models"]


@dataclass(frozen=True)
class ModelFiles:
    """One model to write."""

    name: str
    config: str  # text of its config.pbtxt
    fill: Callable[[Path], None]  # writes a version's files into its folder


def write_models(
    repository: Path, models: Sequence[ModelFiles], version: int, *, force: bool
) -> tuple[Path, ...]:
    """Write a version of each model, all of them or none.

    A model that is there gets one more version, if its configuration stays the same: Triton reads
    one for all versions. They are written beside the repository, where a running server does not
    look, and moved into it.

    Args:
        repository: Its folder; made if it is not there.
        models: What to write.
        version: From 1 up.
        force: Replace this version, and a configuration that no other version needs.

    Returns:
        The folders of the written versions.

    Raises:
        OutputError: If the version exists and `force` is False, another version needs another
            configuration, the folder is no repository, or it cannot be written.
    """
    if (repository / MANIFEST).exists() or (repository.exists() and not repository.is_dir()):
        raise OutputError(
            f"{repository} is not a model repository; a folder of models, or a new one, was "
            "expected"
        )
    plans = [_plan(repository, model, version, force) for model in models]
    try:
        made = _missing(repository)
        repository.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{repository.name}.", dir=repository.parent))
    except OSError as error:
        raise OutputError(f"{repository} cannot be written: {error.strerror}") from error
    placed: list[_Swap] = []
    try:
        for index, model in enumerate(models):
            _draft(scratch / str(index), model, version)
        for index, plan in enumerate(plans):
            placed.append(_Swap(plan.source(scratch / str(index)), plan.target, scratch))
    except BaseException as error:
        for swap in reversed(placed):
            swap.undo()
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(
                f"no space left to write {repository}; nothing was written"
            ) from error
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return tuple(repository / model.name / str(version) for model in models)


@dataclass(frozen=True)
class _Plan:
    target: Path  # what is moved into the repository: a whole model, or one version of it
    version: str | None  # None: the whole model

    def source(self, draft: Path) -> Path:
        return draft if self.version is None else draft / self.version


def _plan(repository: Path, model: ModelFiles, version: int, force: bool) -> _Plan:
    folder = repository / model.name
    config, place = folder / CONFIG, folder / str(version)
    if not folder.exists():
        return _Plan(folder, None)
    if not config.is_file():
        raise OutputError(
            f"{folder} holds no {CONFIG}, so it is not a model; choose another --name"
        )
    if place.exists() and not force:
        raise OutputError(f"{place} exists; choose another --version or pass --force")
    if config.read_text(encoding="utf-8") == model.config:
        return _Plan(place, str(version))
    others = sorted(p.name for p in folder.iterdir() if p.name.isdigit() and p != place)
    if others or not force:
        raise OutputError(
            f"{config} differs from what these options give, and holds for all versions "
            f"({', '.join(others) or version}); choose another --name"
            + ("" if others else " or pass --force")
        )
    return _Plan(folder, None)


def _draft(folder: Path, model: ModelFiles, version: int) -> None:
    files = folder / str(version)
    files.mkdir(parents=True)
    model.fill(files)
    (folder / CONFIG).write_text(model.config, encoding="utf-8")


class _Swap:
    """A folder moved into its place, in exchange for what was there."""

    def __init__(self, source: Path, target: Path, scratch: Path) -> None:
        self._target = target
        self._old = Path(tempfile.mkdtemp(prefix="old.", dir=scratch)) / "old"
        if target.exists():
            target.rename(self._old)
        try:
            source.rename(target)
        except BaseException:
            self._restore()
            raise

    def undo(self) -> None:
        shutil.rmtree(self._target, ignore_errors=True)
        self._restore()

    def _restore(self) -> None:
        if self._old.exists():
            self._old.rename(self._target)


def _missing(folder: Path) -> Path | None:
    """The first folder on the way that is not there; None where all are."""
    missing = [place for place in (folder, *folder.absolute().parents) if not place.exists()]
    return missing[-1] if missing else None
