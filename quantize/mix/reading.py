"""Texts as a float32 bundle reads them, and how far one with other matrices is from that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle, carried_files, copy_files
from headport.errors import ParityError
from headport.graphs import graph_entry, load_graphs, write_graphs
from headport.heads import HeadSessions
from headport.lowering.matrices import Matrix, find_matrices
from headport.metrics import RowScores, score_rows
from headport.quantize.head import HEAD
from headport.runner import PortableRunner, open_runner
from headport.session import SessionSettings
from headport.session_runner import Runner

__all__ = ["Drift", "FedBackbone", "Reader", "Reading", "batches"]

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

_ROWS = 128  # hidden states that the head is given at a time
_TOKENS = 1026  # that the backbone is given at a time: two whole windows
_SAME_KL = 1e-5  # nats: more than another order of float32 sums makes of the same weights


@dataclass(frozen=True)
class Drift:
    """Next-token distributions against the bundle's, over the positions of a text."""

    positions: int
    kl_mean: float  # KL(bundle ‖ rounded), nats
    kl_error: float  # standard error of the mean, positions taken as independent
    perplexity_ratio: float  # rounded ÷ bundle
    perplexity_error: float  # its standard error, likewise
    top1_agreement: float  # share of positions with the same best token


@dataclass(frozen=True)
class Reading:
    """Windows of token ids, and the bundle's logits on them."""

    windows: tuple[Int64, ...]  # each [T + 1]: T positions and the token that follows the last
    logits: Float32  # [N, V], mapped from disk

    @property
    def positions(self) -> int:
        """N, all windows' positions together."""
        return len(self.logits)


class FedBackbone(PortableRunner):
    """A portable backbone whose matrices are inputs of its graph, so that one session runs all.

    `weights` holds them by name, and is the caller's to change between runs.
    """

    def __init__(self, bundle: Bundle, settings: SessionSettings) -> None:
        super().__init__(bundle, settings, ())
        self.weights: dict[str, Float32] = {}

    def _run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        return super()._run(feeds | self.weights)


class Reader:
    """Reads texts with a bundle, and again with other matrices in its place.

    Args:
        source: Portable float32 bundle.
        folder: An empty folder, for the graph and the logits; it outlives the reader.
        settings: Session settings.
    """

    def __init__(self, source: Bundle, folder: Path, settings: SessionSettings) -> None:
        self._source, self._folder, self._settings = source, folder, settings
        self._vocab_size = source.manifest.heads[HEAD].vocab_size
        self._head = HeadSessions(source, settings, (HEAD,))
        model = load_graphs(source)[source.manifest.backbone_name]
        self.matrices, _ = find_matrices(model)
        self._fed = _fed_backbone(source, model, self.matrices, folder / "fed", settings)
        self._readings = 0

    def read(self, windows: Sequence[Int64]) -> Reading:
        """The bundle's own logits on a text's windows."""
        shape = (sum(len(window) - 1 for window in windows), self._vocab_size)
        file = self._folder / f"logits-{self._readings}.npy"
        self._readings += 1
        kept = np.lib.format.open_memmap(file, "w+", np.float32, shape)
        # A session of its own, which ends with the call: it holds all weights once more.
        runner = open_runner(self._source, self._settings, heads=())
        for rows, logits, _ in self._logits(runner, windows):
            kept[rows] = logits
        kept.flush()
        return Reading(tuple(windows), kept)

    def drift(self, weights: dict[str, Float32], reading: Reading) -> Drift:
        """How far the backbone is from the bundle with these matrices, by initialiser.

        Raises:
            NonFiniteError: If a logit is not finite.
        """
        self._fed.weights = weights
        parts = [
            score_rows(np.asarray(reading.logits[rows]), logits, targets, np.zeros(len(targets)))
            for rows, logits, targets in self._logits(self._fed, reading.windows)
        ]
        self._fed.weights = {}
        return _drift(RowScores.concatenate(parts))

    def check(self, weights: dict[str, Float32], reading: Reading) -> Drift:
        """The drift with the bundle's own matrices, which is that of the measurement itself.

        Raises:
            ParityError: If there is more of it than rounding of float32 sums explains.
        """
        found = self.drift(weights, reading)
        if not found.kl_mean <= _SAME_KL:
            raise ParityError(
                f"the backbone with its own matrices handed in differs from the bundle by KL "
                f"{found.kl_mean:.1e}, at most {_SAME_KL:.0e} was expected; nothing was measured"
            )
        return found

    def _logits(
        self, backbone: Runner, windows: Sequence[Int64]
    ) -> Iterator[tuple[slice, Float32, Int64]]:
        """Places among all positions, logits [n, V] and next tokens [n], a few at a time."""
        done = 0
        for batch in batches(windows):
            lengths = np.array([len(window) - 1 for window in batch])
            ids = np.zeros((len(batch), lengths.max()), np.int64)
            for row, window in zip(ids, batch, strict=True):
                row[: len(window) - 1] = window[:-1]
            hidden = backbone.forward(backbone.new_cache(*ids.shape), ids, lengths)
            for window, states, length in zip(batch, hidden, lengths, strict=True):
                for start in range(0, int(length), _ROWS):
                    part = np.ascontiguousarray(states[start : min(start + _ROWS, length)])
                    targets = window[start + 1 : start + 1 + len(part)]
                    yield slice(done, done + len(part)), self._head.full_logits(part), targets
                    done += len(part)


def batches(windows: Sequence[Int64]) -> Iterator[list[Int64]]:
    """The windows in order, as many at once as `_TOKENS` allows: weights are read once for all."""
    batch: list[Int64] = []
    for window in windows:
        longest = max(len(each) for each in (*batch, window))
        if batch and (len(batch) + 1) * longest > _TOKENS:
            yield batch
            batch = []
        batch.append(window)
    yield batch


def _fed_backbone(
    source: Bundle,
    model: Any,
    matrices: Sequence[Matrix],
    folder: Path,
    settings: SessionSettings,
) -> FedBackbone:
    """Open the backbone with its matrices as inputs; `matrices` keep their values."""
    tensors = [matrix.value.const_value for matrix in matrices]
    for matrix in matrices:
        value = matrix.value
        del model.graph.initializers[value.name]
        value.const_value = None
        model.graph.inputs.append(value)
    name = source.manifest.backbone_name
    file = source.manifest.backbone.file
    folder.mkdir()
    copy_files(source.path, carried_files(source.manifest), folder)
    write_graphs({name: model}, {name: file}, folder)
    graphs = source.manifest.graphs | {name: graph_entry(model, file, "backbone")}
    for matrix, tensor in zip(matrices, tensors, strict=True):
        matrix.value.const_value = tensor
    manifest = msgspec.structs.replace(source.manifest, graphs=graphs)
    return FedBackbone(Bundle(folder, manifest), settings.for_target("portable"))


def _drift(scores: RowScores) -> Drift:
    count = len(scores)
    moved = scores.nll_candidate - scores.nll_reference
    ratio = float(np.exp(moved.mean()))
    return Drift(
        positions=count,
        kl_mean=float(scores.kl.mean()),
        kl_error=float(scores.kl.std() / np.sqrt(count)),
        perplexity_ratio=ratio,
        perplexity_error=ratio * float(moved.std() / np.sqrt(count)),
        top1_agreement=float(scores.agreement[:, 0].mean()),
    )
