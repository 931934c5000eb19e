"""The model, its texts, and bundles of every variant, made when first asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.material import texts, twin
from headport.bundle import Bundle
from headport.ledger import head_weight, read_tensor
from headport.runner import open_runner
from headport.session import SessionSettings

__all__ = ["COUNTS", "DEFAULT", "ONE_ROW", "VARIANTS", "Bench", "Variant", "slices"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_WINDOW = 512
COUNTS = (64, 128, 256)
_ROWS = 32


@dataclass(frozen=True)
class Variant:
    """One recipe of a certified head."""

    block: int
    activations: str
    bound: str

    @property
    def name(self) -> str:
        """Folder name."""
        return f"int8-{self.block}-{self.activations}-{self.bound}"


VARIANTS = tuple(
    Variant(block, activations, bound)
    for block in (32, 64, 128)
    for activations in ("residual", "rounded")
    for bound in ("block", "row")
)
DEFAULT = Variant(64, "residual", "row")
ONE_ROW = Variant(64, "rounded", "block")


class Bench:
    """The model, its texts, and bundles made when first asked for."""

    def __init__(
        self, work: Path, positions: int, threads: int, kernels: Path | None = None
    ) -> None:
        self.work = work
        self.threads = threads
        self.kernels = kernels
        self.source = self._export()
        self.settings = SessionSettings(threads=threads, kernels=kernels)
        self.states, self.targets = self._states(positions)
        entry, _ = head_weight(self.source.manifest, self.source.manifest.heads["lm"])
        self.weight: Float32 = np.asarray(read_tensor(self.source, entry))

    def _export(self) -> Bundle:
        folder = self.work / "fp32"
        if not folder.is_dir():
            from headport.export.command import Options, export

            export(Options(model=str(twin(self.work / "twin")), output=folder))
        return Bundle.open(folder, verify=False)

    def _states(self, positions: int) -> tuple[Float32, npt.NDArray[np.int64]]:
        """Hidden states of windows of the texts, and the token that follows each."""
        file = self.work / f"states-{positions}.npz"
        if not file.is_file():
            from headport.runtime.text import Tokens

            tokens = Tokens(self.source)
            runner = open_runner(self.source, self.settings)
            states, targets = [], []
            for text in texts(self.work / "texts", 2 * positions):
                ids = np.array(tokens.encode(text.read_text(encoding="utf-8")), np.int64)
                ids = ids[: positions // 3 + 2]
                for start in range(0, len(ids) - 1, _WINDOW):
                    part = ids[start : start + _WINDOW + 1]
                    cache = runner.new_cache(1, len(part))
                    length = np.array([len(part) - 1])
                    states.append(runner.forward(cache, part[None, :-1], length)[0])
                    targets.append(part[1:])
            np.savez(file, states=np.concatenate(states), targets=np.concatenate(targets))
        found = np.load(file)
        return found["states"], found["targets"]

    @cached_property
    def head(self) -> Bundle:
        """The head alone, tied, behind a lookup: variants of it are made in seconds."""
        from tests.toy_bundles import write_toy

        folder = self.work / "head"
        if not folder.is_dir():
            write_toy(folder, np.array(self.weight), tied=True)
        return Bundle.open(folder, verify=False)

    def certified(self, variant: Variant, count: int = COUNTS[0]) -> Bundle:
        """A certified head, lowered."""
        return self._variant(f"{variant.name}-m{count}", variant, certify=True, rescore=count)

    def plain(self, variant: Variant) -> Bundle:
        """An INT8 head that gives all logits, lowered."""
        return self._variant(f"plain-{variant.name}", variant)

    def _variant(self, name: str, variant: Variant, **options: Any) -> Bundle:
        folder = self.work / f"{name}{self._suffix}"
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=self.work) as scratch:
                made = _quantize(self.head, Path(scratch) / name, variant, **options)
                self._lowered(made, folder)
        return Bundle.open(folder, verify=False)

    def whole(self, target: str, *, certified: bool) -> Bundle:
        """The whole model, with the certified or the float32 head, for a target."""
        name = "certified" if certified else "fp32"
        made = self._whole_certified() if certified else self.source
        if target == "portable":
            return made
        return self._lowered(made, self.work / f"{name}-{target}{self._suffix}")

    def _whole_certified(self) -> Bundle:
        folder = self.work / "certified"
        if not folder.is_dir():
            _quantize(self.source, folder, DEFAULT, certify=True)
        return Bundle.open(folder, verify=False)

    @property
    def _suffix(self) -> str:
        return "" if self.kernels is None else "-own"

    def _lowered(self, made: Bundle, folder: Path) -> Bundle:
        from headport.lowering import Options, lower

        if not folder.is_dir():
            options = Options(bundle=made.path, output=folder, target="ort-cpu")
            lower(options.__replace__(kernels=self.kernels))
        return Bundle.open(folder, verify=False)

    def truth(self, rows: slice) -> Float64:
        """Logits of some positions in float64, [n, V]."""
        return self.states[rows].astype(np.float64) @ self._wide.T

    @cached_property
    def _wide(self) -> Float64:
        return self.weight.astype(np.float64)

    @cached_property
    def leading(self) -> Float32:
        """The eleven largest logits of every position, descending."""
        parts = []
        for rows in slices(len(self.states)):
            logits = self.states[rows] @ self.weight.T
            parts.append(-np.sort(-np.partition(logits, -11, axis=1)[:, -11:], axis=1))
        found: Float32 = np.concatenate(parts)
        return found


def _quantize(source: Bundle, output: Path, variant: Variant, **options: Any) -> Bundle:
    from headport.quantize import Options, quantize

    asked: dict[str, Any] = {
        "block": variant.block,
        "activations": variant.activations,
        "bound": variant.bound,
        **options,
    }
    return quantize(Options(bundle=source.path, output=output, head="int8", **asked))


def slices(count: int, step: int = _ROWS) -> Iterator[slice]:
    """Parts of `count` rows."""
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
