"""One recipe of a sweep: written, lowered, and run by ONNX Runtime on stored hidden states."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.graphs import graph_entry, write_graphs
from headport.heads import HeadSessions
from headport.lowering.head import lower_head, packed_name
from headport.manifest import Manifest
from headport.memory import MEASURABLE, measure_graph
from headport.metrics import RowScores, score_rows
from headport.quantize.calibration import Calibration
from headport.quantize.head import HEAD, quantise_head
from headport.quantize.recipes import Recipe
from headport.quantize.states import States
from headport.session import SessionSettings

__all__ = ["Ground", "Trial", "try_recipe"]

Float32 = npt.NDArray[np.float32]
Logits = Callable[[Float32], Float32]

_ROWS = 128  # hidden states at a time
_STEPS, _COLD = 24, 4  # timed steps of one row, and those before them that are not counted


@dataclass(frozen=True)
class Trial:
    """What a recipe costs and loses, measured on the files it would write."""

    recipe: str
    stored_bytes: int  # of tensors that only the head reads
    resident_bytes: int | None  # of memory for the head alone; None: not told on this system
    read_bytes: int  # by one row: what the head reads of them and of shared ones
    positions: int
    kl_mean: float  # KL(reference ‖ head), nats
    kl_p99: float
    perplexity_ratio: float
    top1_agreement: float
    top10_agreement: float
    step_ratio: float  # of one row's time to that of the head before, in turns
    step_ms: float
    seconds: float  # for the whole trial
    worst: tuple[int, ...]  # positions of the largest KL


@dataclass(frozen=True)
class Ground:
    """What every recipe of a sweep is tried on."""

    source: Bundle
    states: States
    calibration: Calibration | None  # for recipes that are compensated
    settings: SessionSettings
    head: HeadSessions  # the head as it is
    wanted: Float32  # its logits [N, V], mapped from disk

    @classmethod
    def prepare(
        cls,
        source: Bundle,
        states: States,
        calibration: Calibration | None,
        folder: Path,
        settings: SessionSettings,
    ) -> Ground:
        """Run the head before over all states, once for all recipes.

        Args:
            source: Portable bundle.
            states: Hidden states and next tokens.
            calibration: Of the calibration texts, if there are any.
            folder: Where the logits go.
            settings: Session settings.
        """
        head = HeadSessions(source, settings, (HEAD,))
        shape = (len(states.states), source.manifest.heads[HEAD].vocab_size)
        wanted = np.lib.format.open_memmap(folder / "reference.npy", "w+", np.float32, shape)
        for rows in _slices(len(states.states)):
            wanted[rows] = head.full_logits(np.asarray(states.states[rows]))
        wanted.flush()
        return cls(source, states, calibration, settings, head, wanted)


def try_recipe(recipe: Recipe, ground: Ground) -> Trial:
    """Write the recipe's head for ort-cpu, run it, and compare it with the head before."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="headport.") as folder:
        made = _written(recipe, ground, Path(folder))
        head = HeadSessions(made, ground.settings, (HEAD,))
        candidates = made.manifest.heads[HEAD].candidates is not None
        logits: Logits = head.rescored_logits if candidates else head.full_logits
        scores = _scores(logits, ground)
        step, ratio = _step(head, ground)
        stored, read = _bytes(made.manifest, ground.source.manifest)
        resident = _resident_bytes(made, ground.settings)
    drift = float(np.mean(scores.nll_candidate - scores.nll_reference))
    return Trial(
        recipe=recipe.text,
        stored_bytes=stored,
        resident_bytes=resident,
        read_bytes=read,
        positions=len(scores),
        kl_mean=float(scores.kl.mean()),
        kl_p99=float(np.quantile(scores.kl, 0.99)),
        perplexity_ratio=float(np.exp(drift)),
        top1_agreement=float(scores.agreement[:, 0].mean()),
        top10_agreement=float(scores.agreement[:, 2].mean()),
        step_ratio=ratio,
        step_ms=1e3 * step,
        seconds=time.perf_counter() - start,
        worst=tuple(np.argsort(-scores.kl, kind="stable")[:5].tolist()),
    )


def _written(recipe: Recipe, ground: Ground, folder: Path) -> Bundle:
    """The head alone, as a lowered bundle would hold it."""
    calibration = ground.calibration if recipe.compensated else None
    made = quantise_head(ground.source, recipe.options, calibration)
    entry = made.entry
    model = made.models[entry.graph]
    lower_head(model, entry, HEAD)
    packed = packed_name(entry.weight)
    if packed in model.graph.initializers:
        entry = msgspec.structs.replace(entry, weight=packed)
    files = {name: f"{name}.onnx" for name in made.models}
    tensors = write_graphs(made.models, files, folder)
    graphs = {name: graph_entry(made.models[name], file, "head") for name, file in files.items()}
    manifest = msgspec.structs.replace(
        ground.source.manifest,
        graphs=graphs,
        heads={HEAD: entry},
        tensors=tensors,
        target="ort-cpu",
    )
    return Bundle(folder, manifest)


def _scores(logits: Logits, ground: Ground) -> RowScores:
    parts, states = [], ground.states
    for rows in _slices(len(states.states)):
        found = logits(np.asarray(states.states[rows]))
        bound = np.zeros(len(found))
        parts.append(
            score_rows(np.asarray(ground.wanted[rows]), found, states.targets[rows], bound)
        )
    return RowScores.concatenate(parts)


def _step(head: HeadSessions, ground: Ground) -> tuple[float, float]:
    """Median seconds of one row, and by that of the head before, taken in turns."""
    seconds: dict[str, list[float]] = {"head": [], "reference": []}
    run: Mapping[str, HeadSessions] = {"head": head, "reference": ground.head}
    for turn in range(_COLD + _STEPS):
        row = np.asarray(ground.states.states[turn % len(ground.states.states)])[None]
        for name, each in run.items():
            start = time.perf_counter()
            each.head(row)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: float(np.median(found[_COLD:])) for name, found in seconds.items()}
    return medians["head"], medians["head"] / medians["reference"]


def _bytes(made: Manifest, source: Manifest) -> tuple[int, int]:
    head = made.heads[HEAD]
    form = head.candidates
    read = [t for t in made.tensors if any(c.startswith(f"{head.graph}:") for c in t.consumers)]
    shared = {t.sha256 for t in source.tensors if source.heads[HEAD].tied}
    stored = sum(t.length for t in made.tensors if t.sha256 not in shared)
    if form is None:
        return stored, sum(t.length for t in read)
    whole = [t for t in read if t.name == form.original]
    rows = sum(form.count * (t.length // t.shape[0]) for t in whole)
    return stored, sum(t.length for t in read if t.name != form.original) + rows


def _resident_bytes(made: Bundle, settings: SessionSettings) -> int | None:
    if not MEASURABLE:
        return None
    file = made.path / made.manifest.graphs[made.manifest.heads[HEAD].graph].file
    return measure_graph(file, made.manifest.session_options, settings.threads)


def _slices(count: int) -> Iterator[slice]:
    for start in range(0, count, _ROWS):
        yield slice(start, min(start + _ROWS, count))
