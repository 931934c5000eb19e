"""Which stage of a backbone first leaves the reference by more than the noise.

Two copies of the backbone's graph are run beside the reference. One shows the state behind every
stage, where errors add up. In the other, every layer starts from the reference's own state, so
that a layer answers for itself alone, and a late fault is seen as well as an early one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import UsageError
from headport.learnt_prefix import PREFIX_FILE
from headport.runner import open_runner
from headport.session import SessionSettings
from headport.validate.boundaries import Boundary, boundaries_of, write_exposed
from headport.validate.comparison import Job
from headport.validate.evidence import BisectedStage, Bisection
from headport.validate.sides import ReferenceSide

__all__ = ["MAX_WINDOWS", "bisect", "find_stages"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

MAX_WINDOWS = 2  # each costs a session of its own
_UNIT_ROUNDOFF = 2.0**-24
# A sum of H products rounds by about √H · 2⁻²⁴ of its terms; sums of several such, in another
# order than the reference's, reach a few times that.
_ROUNDING_FACTOR = 10.0
# Layers that are rounded alike differ by less than this from the middle one.
_SPREAD_FACTOR = 4.0


def find_stages(bundle: Bundle) -> list[Boundary]:
    """The places between the layers of a bundle's backbone.

    Raises:
        UsageError: If there is no single state between them, as in models with several streams.
    """
    graph = bundle.manifest.backbone
    found = boundaries_of(bundle.path / graph.file)
    if not found:
        raise UsageError(
            f"--bisect: {bundle.path}: one state between layers was expected, none is found in "
            f"{graph.file}; leave --bisect out"
        )
    return found


def bisect(
    jobs: Sequence[Job], bundle: Bundle, settings: SessionSettings, reference: ReferenceSide
) -> Bisection:
    """Find the stage.

    Args:
        jobs: Windows; the first `MAX_WINDOWS` are run.
        bundle: The candidate, portable or lowered.
        settings: As the candidate runs.
        reference: A model that can be looked into; nothing asked.

    Raises:
        UsageError: If either side has no state of its own between layers, as models with several
            streams, or the two differ in layers.
    """
    boundaries = find_stages(bundle)
    found = []
    for job in list(jobs)[:MAX_WINDOWS]:
        ids = job.window.token_ids
        states = _reference_states(ids, boundaries, reference, other_path=False)
        other = states
        if reference.ready().other_path:
            other = _reference_states(ids, boundaries, reference, other_path=True)
        whole = _run(ids, bundle, settings, None, states.shape)
        alone = _run(ids, bundle, settings, states[: len(boundaries)], states.shape)
        found.append(_shares(states, other, whole, alone))
    tokens = sum(len(job.window.token_ids) for job in list(jobs)[:MAX_WINDOWS])
    # Windows weigh alike: they are of one size, but for a short text's.
    means: Float64 = np.mean(found, axis=0)
    return _judged(_names(boundaries), means, tokens, coarse=_is_coarse(bundle))


def _reference_states(
    ids: Int64, boundaries: Sequence[Boundary], reference: ReferenceSide, *, other_path: bool
) -> Float32:
    """The reference's states at the boundaries and into the head, [S, T, H]."""
    states = reference.layer_states(ids, other_path=other_path)
    if states is None:
        raise UsageError(
            f"--bisect: {reference.ready().facts.model} shows no single state between its layers; "
            "leave --bisect out"
        )
    layers = len(states) - 2
    known = [b.layer for b in boundaries if b.layer is not None]
    if max(known) >= layers:
        raise UsageError(
            f"--bisect: the reference has {layers} layers and the bundle a layer {max(known)}; "
            "pass the checkpoint that the bundle was exported from"
        )
    places = [layers if b.layer is None else b.layer for b in boundaries]
    return states[[*places, len(states) - 1]]


def _run(
    ids: Int64,
    bundle: Bundle,
    settings: SessionSettings,
    pinned: Float32 | None,
    shape: tuple[int, ...],
) -> Float32:
    """The candidate's states at the boundaries and into the head, [S, T, H]."""
    stages, rows, width = shape
    with _copy(bundle, pinned, stages) as copy:
        runner = open_runner(copy, settings, heads=())
        cache = runner.new_cache(1, rows)
        found = runner.forward(cache, ids[None], np.array([rows]))[0]
    if found.shape != (rows, stages * width):
        raise UsageError(
            f"--bisect: states of {width} numbers between the layers of {bundle.path} expected, "
            f"{found.shape[1] / stages:g} found; leave --bisect out"
        )
    return np.ascontiguousarray(found.reshape(rows, stages, width).swapaxes(0, 1))


@contextmanager
def _copy(bundle: Bundle, pinned: Float32 | None, stages: int) -> Iterator[Bundle]:
    """A copy of the bundle whose hidden states are those of all boundaries side by side."""
    manifest = bundle.manifest
    graph = manifest.backbone
    with tempfile.TemporaryDirectory(prefix="headport-") as folder:
        target = Path(folder)
        for name in manifest.files:
            if name.startswith("data/") or name == PREFIX_FILE:
                _place(bundle.path / name, target / name)
        write_exposed(bundle.path / graph.file, target / graph.file, pinned)
        size = manifest.model.hidden_size * stages
        facts = msgspec.structs.replace(manifest.model, hidden_size=size)
        yield Bundle(target, msgspec.structs.replace(manifest, model=facts))


def _place(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)  # ONNX Runtime refuses external data behind a symbolic link
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _shares(states: Float32, other: Float32, whole: Float32, alone: Float32) -> Float64:
    """Per stage: error of the whole run, own error, noise; [S, 3], mean over positions."""
    before = np.concatenate([np.zeros_like(states[:1]), states[:-1]])
    before[-1] = 0  # the final norm adds nothing: it makes a state of its own
    size, added = _norms(states), _norms(states - before)
    rounding = np.sqrt(states.shape[2]) * _UNIT_ROUNDOFF * np.maximum(size / added, 1)
    noise = np.maximum(rounding, _norms(other - states) / added)
    parts = (_norms(whole - states) / size, _norms(alone - states) / added, noise)
    return np.stack([part.mean(axis=1) for part in parts], axis=1)


def _norms(states: Float32) -> Float64:
    squares: Float64 = np.einsum("sth,sth->st", states, states, dtype=np.float64)
    return np.sqrt(np.maximum(squares, np.finfo(np.float64).tiny))


def _names(boundaries: Sequence[Boundary]) -> list[str]:
    """A stage reaches from one boundary to the next."""
    names = ["embedding"]
    layers = [boundary.layer for boundary in boundaries]
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        if layer is None:
            names.append("final norm")
        elif following is None or following == layer + 1:
            names.append(f"layer {layer}")
        else:
            names.append(f"layers {layer} to {following - 1}")
    if layers[-1] is not None:
        names[-1] += " and final norm"
    return names


def _is_coarse(bundle: Bundle) -> bool:
    manifest = bundle.manifest
    return manifest.model.dtype != "fp32" or manifest.backbone_quantization is not None


def _judged(names: Sequence[str], shares: Float64, tokens: int, *, coarse: bool) -> Bisection:
    """Stages against their noise; of a rounded backbone, against the other layers as well."""
    noise = shares[:, 2]
    limit = _ROUNDING_FACTOR * noise
    source = "float32 rounding, and the reference's other code path"
    if coarse:
        layers = np.sort(shares[1:-1, 1])
        if len(layers) < 2:
            raise UsageError(
                "--bisect judges a rounded backbone by its other layers, and this one has too few "
                "between its embedding and its end; bisect the bundle it was quantised from"
            )
        # The lower of two middle ones, so that one of two layers can stand out.
        middle = float(layers[(len(layers) - 1) // 2])
        noise, limit = np.maximum(noise, middle), np.maximum(limit, _SPREAD_FACTOR * middle)
        source = "the middle one of the layers' own errors, as the backbone's weights are rounded"
    stages = tuple(
        BisectedStage(
            stage=name,
            error=float(row[0]),
            own_error=float(row[1]),
            noise=float(level),
            limit=float(most),
        )
        for name, row, level, most in zip(names, shares, noise, limit, strict=True)
    )
    first = next((stage for stage in stages if not stage.own_error <= stage.limit), None)
    return Bisection(
        tokens=tokens,
        noise=source,
        stages=stages,
        first=None if first is None else first.stage,
        finding=_finding(stages, first),
    )


def _finding(stages: Sequence[BisectedStage], first: BisectedStage | None) -> str:
    if first is None:
        worst: Any = max(stages, key=lambda stage: stage.own_error / stage.limit)
        return (
            f"no stage leaves the reference by more than the noise; the nearest to it is "
            f"{worst.stage}, with an error of {worst.own_error:.1e} of what it adds"
        )
    others = sum(stage.own_error > stage.limit for stage in stages) - 1
    return (
        f"{first.stage} is the first to leave the reference: its own error is "
        f"{first.own_error:.1e} of what it adds, {first.own_error / first.noise:.0f} times the "
        f"noise; {others or 'no'} other stage{'' if others == 1 else 's'} "
        f"{'does' if others == 1 else 'do'}"
    )
