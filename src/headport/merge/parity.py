"""Parity: the merged file against the bundle it was made from, run as the other runtimes run it.

The bundle's answers come from its own runner. The merged file is fed what those runtimes feed: an
attention mask, batches padded on their side, caches that grow or that are shared buffers. It is
run twice, under the bundle's session options and under ONNX Runtime's defaults, because the same
file may answer differently under each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.cache_ports import is_past, present_name
from headport.manifest import Manifest
from headport.progress import bar
from headport.runner import Runner, open_runner
from headport.session import Session, SessionSettings, open_session

__all__ = ["Agreement", "Case", "MergeParity", "check_merged", "plan_cases"]

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Side = Literal["left", "right"]

# Of the largest |logit|. Two right programs differ by far less: 1e-6 in float32, 1e-3 in float16.
_RELATIVE = {"fp32": 2e-4, "fp16": 2e-2}
# Where a kernel rounds activations, the last bit may send one of them to the other neighbour.
_RELATIVE_ROUNDED = 4e-3
_REACH = 640  # tokens; windows and contexts below it are crossed
_SHORT = 24
_DECODE = 3
_LOGIT_BYTES = 512 << 20  # of one run
_TINY = 1e-30
HEAD = "lm"


@dataclass(frozen=True)
class Case:
    """One way to run a batch: new tokens per row, step by step, padded on one side."""

    name: str
    side: Side
    steps: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Agreement:
    """The merged file under some session options against the bundle's runner."""

    options: dict[str, str]
    errors: dict[str, float]  # by case: max |Δlogit| / max |logit|
    max_abs_logit_error: float  # logits
    top1_changed: int  # positions whose largest logit is another token's

    def within(self, limit: float) -> bool:
        """Whether every case stays within a relative limit."""
        return all(error <= limit for error in self.errors.values())


@dataclass(frozen=True)
class MergeParity:
    """What was compared: all logits of every valid position."""

    positions: int
    limit: float  # accepted max |Δlogit| / max |logit|
    bundle_options: Agreement
    default_options: Agreement
    windows_not_crossed: tuple[int, ...]  # longer than any case

    def __bool__(self) -> bool:
        return bool(self.positions and self.bundle_options.within(self.limit))


def plan_cases(
    max_context: int, windows: tuple[int, ...], vocab_size: int, sides: tuple[Side, ...]
) -> tuple[Case, ...]:
    """A prompt in two pieces and alone, and a ragged batch for each side of padding.

    Args:
        max_context: Tokens the model can hold.
        windows: Attention windows of its layers, 0 for none.
        vocab_size: Logits per position; bounds the memory of a run.
        sides: Where the runtimes pad.
    """
    reach = max(_SHORT, min(_REACH, _LOGIT_BYTES // (4 * vocab_size)))
    crossed = [w + 8 for w in windows if 0 < w + 8 <= reach]
    longest = max_context if max_context <= reach else max(_SHORT, *crossed, 0)
    prompt = max(1, longest - _DECODE)
    decode = longest - prompt
    half = max(1, prompt // 2)
    pieces = [(half,), (prompt - half,)] if prompt > half else [(prompt,)]
    rows = (prompt, min(3, prompt), min(9, prompt))
    return (
        Case("alone", "right", (*pieces, *[(1,)] * decode)),
        *(Case(f"{side}-padded batch", side, (rows, *[(1, 1, 1)] * decode)) for side in sides),
    )


def check_merged(
    bundle: Bundle,
    file: Path,
    cases: tuple[Case, ...],
    windows: tuple[int, ...],
    settings: SessionSettings | None = None,
) -> MergeParity:
    """Run bundle and merged file in every way, compare all logits of valid positions.

    Args:
        bundle: What was merged.
        file: The merged `.onnx` file.
        cases: From `plan_cases`.
        windows: Attention windows of the layers, 0 for none.
        settings: How both are run.
    """
    manifest = bundle.manifest
    with bar(3 * len(cases), "parity", "run") as progress:
        runner = open_runner(bundle, settings, heads=(HEAD,))
        expected = []
        for case in cases:
            expected.append(np.concatenate(list(_bundle_rows(runner, case, manifest))))
            progress.update()
        del runner  # one model in memory at a time
        found = []
        for options in (manifest.session_options, {}):
            session = open_session(file, options, settings)
            found.append(_agreement(manifest, session, options, zip(cases, expected, strict=True)))
            progress.update(len(cases))
            del session
    longest = max(sum(row) for case in cases for row in zip(*case.steps, strict=True))
    return MergeParity(
        positions=sum(len(rows) for rows in expected),
        limit=_limit(manifest),
        bundle_options=found[0],
        default_options=found[1],
        windows_not_crossed=tuple(sorted({w for w in windows if w >= longest})),
    )


def _limit(manifest: Manifest) -> float:
    limit = _RELATIVE[manifest.model.dtype]
    head = manifest.heads[HEAD]
    rounds = (
        manifest.target != "portable"
        and head.outputs == "logits"
        and head.quantization is not None
        and head.quantization.activations == "rounded"
    )
    return max(limit, _RELATIVE_ROUNDED) if rounds else limit


def _steps(case: Case, vocab_size: int) -> Iterator[tuple[Int64, Int64]]:
    """New tokens per row [B] and ids [B, T], each row's tokens first."""
    rng = np.random.Generator(np.random.Philox(key=5))
    for step in case.steps:
        lengths = np.array(step, np.int64)
        yield lengths, rng.integers(0, vocab_size, (len(step), max(step)))


def _bundle_rows(runner: Runner, case: Case, manifest: Manifest) -> Iterator[Float32]:
    capacity = sum(max(step) for step in case.steps)
    cache = runner.new_cache(len(case.steps[0]), capacity)
    whole = manifest.heads[HEAD].candidates is not None
    for lengths, ids in _steps(case, manifest.vocabulary.size):
        hidden = runner.forward(cache, ids, lengths)
        for row, length in zip(hidden, lengths, strict=True):
            if whole:
                yield runner.full_logits(row[:length], HEAD)
                continue
            logits = runner.head(row[:length], HEAD).logits
            assert logits is not None
            yield logits


def _agreement(
    manifest: Manifest,
    session: Session,
    options: Mapping[str, str],
    cases: Iterable[tuple[Case, Float32]],
) -> Agreement:
    kind = _Shared if manifest.target == "ort-cpu" else _Growing
    errors: dict[str, float] = {}
    largest, changed = 0.0, 0
    for case, wanted in cases:
        rows = _merged_rows(session, kind(session, case), case, manifest)
        found = np.concatenate(list(rows))
        error = _largest(found - wanted)
        errors[case.name] = error / max(_largest(wanted), _TINY)
        largest = max(largest, error)
        changed += int((found.argmax(1) != wanted.argmax(1)).sum())
    return Agreement(dict(options), errors, largest, changed)


def _merged_rows(
    session: Session, caches: _Growing | _Shared, case: Case, manifest: Manifest
) -> Iterator[Float32]:
    mask = np.zeros((len(case.steps[0]), 0), np.int64)
    V = manifest.heads[HEAD].vocab_size
    for lengths, ids in _steps(case, manifest.vocabulary.size):
        width = ids.shape[1]
        valid = np.arange(width)[None, :] < lengths[:, None]
        given = np.where(valid, ids, 0)
        if case.side == "left":
            given, valid = _to_the_right(given, lengths), valid[:, ::-1]
        mask = np.concatenate([mask, valid.astype(np.int64)], axis=1)
        feeds = {"input_ids": given, "attention_mask": mask}
        if "position_ids" in session.inputs:
            feeds["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)[:, -width:]
        logits = caches.run({n: np.ascontiguousarray(a) for n, a in feeds.items()}, V)
        for row, marks in zip(logits, valid, strict=True):
            yield row[marks]


def _to_the_right(ids: Int64, lengths: Int64) -> Int64:
    return np.stack([np.roll(row, len(row) - n) for row, n in zip(ids, lengths, strict=True)])


def _largest(values: Array) -> float:
    largest = float(np.abs(values).max(initial=0.0))
    return largest if np.isfinite(largest) else np.inf


class _Growing:
    """Caches that grow with every step: what a step gave is what the next one takes."""

    def __init__(self, session: Session, case: Case) -> None:
        self._session = session
        self._past = {name: _cache(session, name, case, 0) for name in _past_names(session)}

    def run(self, feeds: dict[str, Array], vocab_size: int) -> Float32:
        """Logits [B, T, V] of a step."""
        del vocab_size  # ONNX Runtime makes the array
        found = self._session.run(feeds | self._past)
        self._past = {name: found[present_name(name)] for name in self._past}
        logits: Float32 = found["logits"]
        return logits


class _Shared:
    """Caches that are buffers of fixed size, each bound as input and as output."""

    def __init__(self, session: Session, case: Case) -> None:
        capacity = sum(max(step) for step in case.steps)
        self._session = session
        self._buffers = {
            name: _cache(session, name, case, capacity) for name in _past_names(session)
        }

    def run(self, feeds: dict[str, Array], vocab_size: int) -> Float32:
        """Logits [B, T, V] of a step."""
        shape = (*feeds["input_ids"].shape, vocab_size)
        logits = np.zeros(shape, self._session.dtype("logits"))
        binding = self._session.bind()
        for name, array in (feeds | self._buffers).items():
            binding.input(name, array)
        for name, buffer in self._buffers.items():
            binding.output(present_name(name), buffer)
        binding.output("logits", logits)
        binding.run()
        return logits


def _past_names(session: Session) -> list[str]:
    return [name for name in session.inputs if is_past(name)]


def _cache(session: Session, name: str, case: Case, length: int) -> Array:
    _, heads, _, size = session.shape(name)
    shape = (len(case.steps[0]), int(str(heads)), length, int(str(size)))
    return np.zeros(shape, session.dtype(name))
