"""The check after pruning: what was written, and how it answers, against what it was made from.

Stored rows are compared bit by bit, through the tensor ledgers of both bundles (short ones: in the
graphs) and with none of the code that cut them. Then both bundles run: on tokens from end to end,
and their heads on the same hidden states. A row's product does not depend on the other rows, so
logits are expected to be equal bit by bit; where a kernel sums in another order because the matrix
is narrower, the report says so and the difference must be rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.bundle import Bundle
from headport.certificate_check import check_certificate
from headport.errors import ParityError
from headport.ledger import find_tensor, read_tensor
from headport.runner import Runner, open_runner
from headport.session import SessionSettings
from headport.session_runner import read_examples
from headport.source_encoder import example_sources

__all__ = ["CutTensor", "PruneCheck", "Pruned", "check_pruned"]

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

_ROUNDING = 1e-5  # of the largest magnitude; sums of float32 in another order move by 1e-6
_PROMPT = 12  # tokens
_STATES = 8  # hidden states made up beside the model's own
_EQUAL_ROWS = "certificate.equal_rows"  # holds row numbers, which change
_CHUNK_ROWS = 4096


@dataclass(frozen=True)
class CutTensor:
    """A tensor of which some rows stayed: graph, and its names there before and after."""

    graph: str
    before: str
    after: str


@dataclass(frozen=True)
class Pruned:
    """What was done to a bundle's tensors."""

    token_ids: Int64  # kept ids as the bundle before knows them, ascending, [K]
    columns: Int64  # columns of its head that stayed, [K]
    renumbered: bool  # the backbone knows tokens by their place in `token_ids`
    heads: tuple[CutTensor, ...]
    tables: tuple[CutTensor, ...]


@dataclass(frozen=True)
class PruneCheck:
    """How the written bundle answers, against the one it was made from."""

    tensors: int  # compared row by row, all equal bit by bit
    logits: int  # compared
    logits_bit_equal: bool
    max_abs_logit_error: float  # logits
    hidden_states_bit_equal: bool  # end to end, the tokens of a prompt and of one step

    def __bool__(self) -> bool:
        return self.tensors > 0 and self.logits > 0


def check_pruned(
    source: Bundle, written: Bundle, pruned: Pruned, settings: SessionSettings | None = None
) -> PruneCheck:
    """Compare a pruned bundle, as it lies on disk, with the bundle it was made from.

    Args:
        source: The bundle before.
        written: The bundle after.
        pruned: What was done.
        settings: Session settings of both.

    Raises:
        ParityError: If a stored row differs, a logit or hidden state differs by more than rounding,
            or a certificate no longer holds.
    """
    tensors = _check_rows(source, written, pruned)
    rng = np.random.Generator(np.random.Philox(key=23))
    places = rng.integers(0, len(pruned.token_ids), (2, _prompt(source)))
    read = example_sources(source.manifest, rng)
    made_up = rng.normal(size=(_STATES, source.manifest.model.hidden_size)).astype(np.float32)
    # One after the other: each is closed when it has answered, so only one is in memory.
    before = _observe(source, (pruned.token_ids[places], read), made_up, settings)
    ids = places if pruned.renumbered else pruned.token_ids[places]
    after = _observe(written, (ids, read), made_up, settings, same_states=before.states)
    worst, count, equal = 0.0, 0, True
    for name, expected in before.logits.items():
        kept, found = expected[:, pruned.columns], after.logits[name]
        worst = max(worst, _difference(kept, found, f"head {name}"))
        equal = equal and np.array_equal(kept, found)
        count += found.size
    _difference(before.states, after.states, "the backbone")
    return PruneCheck(
        tensors=tensors,
        logits=count,
        logits_bit_equal=bool(equal),
        max_abs_logit_error=worst,
        hidden_states_bit_equal=bool(np.array_equal(before.states, after.states)),
    )


def _check_rows(source: Bundle, written: Bundle, pruned: Pruned) -> int:
    compared = 0
    for cuts, rows in ((pruned.heads, pruned.columns), (pruned.tables, pruned.token_ids)):
        for cut in cuts:
            if cut.before == _EQUAL_ROWS:
                continue
            old = _stored(source, cut.graph, cut.before)
            new = _stored(written, cut.graph, cut.after)
            if new.shape != (len(rows), *old.shape[1:]):
                raise ParityError(
                    f"{cut.after}: shape {(len(rows), *old.shape[1:])} expected, {new.shape} "
                    "written; nothing was written"
                )
            for start in range(0, len(rows), _CHUNK_ROWS):
                part = slice(start, start + _CHUNK_ROWS)
                same = _bits(old[rows[part]]) == _bits(new[part])
                if not same.all():
                    row = start + int(np.argmin(same.all(axis=1)))
                    raise ParityError(
                        f"{cut.after}: row {row} is not row {rows[row]} of {cut.before}; nothing "
                        "was written"
                    )
            compared += 1
    return compared


def _stored(bundle: Bundle, graph: str, name: str) -> Array:
    manifest = bundle.manifest
    consumer = f"{graph}:{name}"
    if any(consumer in tensor.consumers for tensor in manifest.tensors):
        return read_tensor(bundle, find_tensor(manifest, graph, name))
    model = ir.load(bundle.file(manifest.graphs[graph].file))  # too short for the ledger
    value = model.graph.initializers[name].const_value
    assert value is not None, f"{consumer} was cut, so it is stored"
    found: Array = value.numpy()
    return found


def _bits(array: Array) -> Array:
    """[n, bytes of a row]."""
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)


@dataclass(frozen=True)
class _Observed:
    """What a bundle answered."""

    states: Float32  # of its own tokens, [N, H]
    logits: Mapping[str, Float32]  # of the states given or else of its own, by head and kind


def _observe(
    bundle: Bundle,
    given: tuple[Int64, Sequence[Array]],
    made_up: Float32,
    settings: SessionSettings | None,
    same_states: Float32 | None = None,
) -> _Observed:
    runner = open_runner(bundle, settings)
    token_ids, sources = given  # sources of an encoder-decoder bundle; else none
    batch, width = token_ids.shape
    cache = runner.new_cache(batch, width)
    if sources:
        read_examples(runner, cache, sources)
    prompt = runner.forward(cache, token_ids[:, :-1], np.full(batch, width - 1))
    step = runner.forward(cache, token_ids[:, -1:], np.ones(batch, np.int64))
    states = np.concatenate([prompt, step], axis=1).reshape(batch * width, -1)
    logits: dict[str, Float32] = {}
    own = states if same_states is None else same_states
    for name, head in bundle.manifest.heads.items():
        logits |= _logits(runner, name, np.concatenate([own, made_up]), head.outputs)
        end_to_end = _logits(runner, name, states, head.outputs)
        logits |= {f"{key}, end to end": found for key, found in end_to_end.items()}
        if head.candidates is not None and head.candidates.certified and same_states is not None:
            proof = check_certificate(bundle, runner, name)
            if not proof:
                raise ParityError(f"head {name}: {proof.text()}; nothing was written")
    return _Observed(states, logits)


def _logits(runner: Runner, name: str, states: Float32, outputs: str) -> dict[str, Float32]:
    found = {name: runner.full_logits(states, name)}
    if outputs == "candidates":
        quantised = runner.quantised(states, name)
        found[f"{name}, quantised"] = quantised.logits
        found[f"{name}, upper bounds"] = quantised.upper_bounds
    return found


def _prompt(bundle: Bundle) -> int:
    return max(2, min(_PROMPT, bundle.manifest.model.max_context))


def _difference(expected: Array, found: Array, what: str) -> float:
    if expected.shape != found.shape:
        raise ParityError(
            f"{what}: {expected.shape} values expected, {found.shape} found; nothing was written"
        )
    error = np.abs(expected.astype(np.float64) - found.astype(np.float64))
    worst = float(error.max(initial=0.0))
    limit = _ROUNDING * float(np.abs(expected).max(initial=0.0))
    if not worst <= limit:
        raise ParityError(
            f"{what} does not answer for the kept tokens as before: |Δ| {worst:.3g}, "
            f"{limit:.3g} is accepted; nothing was written"
        )
    return worst
