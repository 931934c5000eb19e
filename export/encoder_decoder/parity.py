"""Parity of an encoder-decoder bundle: the written files against PyTorch's own forward.

Every row has a source of its own length and tokens that are given, not chosen. The untouched model
sees each row alone, without a cache and without padding; the bundle runs them in every way that the
runtime does: sources alone and in one padded batch, tokens at once and one by one, rows of
different sources and rows of one source side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headport.bundle import Bundle
from headport.errors import ParityError, RunError
from headport.export.checkpoint import run_reference
from headport.export.encoder_decoder.families import Family
from headport.export.encoder_decoder.relative import relative_modules
from headport.export.encoder_decoder.trace import example_inputs
from headport.export.parity import (
    RELATIVE,
    ParityPlan,
    ParityReport,
    Proof,
    check_report,
    largest_error,
    plan_parity,
    run_pieces,
)
from headport.manifest import Source
from headport.progress import track
from headport.runner import Cache, PortableRunner, open_runner
from headport.selftest import write_selftest
from headport.source_encoder import Encoded

__all__ = ["SourcedPlan", "plan_sources", "prove_sources", "sourced_logits"]

Float32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

_LONG = 640  # tokens; tables of positions below this are read to their end
_LENGTHS = (24, 3, 11, 1)


@dataclass(frozen=True)
class SourcedPlan:
    """What is run: tokens of each row, and the source that it reads."""

    tokens: ParityPlan
    sources: tuple[Array, ...]  # per row, ids [S] or features [F, frames]


def plan_sources(model: Any, family: Family, source: Source, max_context: int) -> SourcedPlan:
    """Choose rows and their sources: up to the ends of all tables, and beyond all distances.

    Args:
        model: Gives sizes.
        family: What it reads.
        source: What is stated of it.
        max_context: Tokens the decoder can hold.
    """
    halves = (model.get_encoder(), model.get_decoder())
    reach = [m.relative_attention_max_distance for half in halves for m in relative_modules(half)]
    rows = model.get_output_embeddings().weight.shape[0]
    tokens = plan_parity(rows, max_context, tuple(reach))
    rng = np.random.Generator(np.random.Philox(key=11))
    if source.vocab_size is None:
        shape = example_inputs(model, family, 1, 1)["input_features"].shape[1:]
        features = (rng.standard_normal(shape).astype(np.float32) for _ in _LENGTHS)
        return SourcedPlan(tokens, tuple(features))
    longest, *shorter = _LENGTHS
    longest = max(longest, *(distance + 8 for distance in reach), 0)
    if source.max_length is not None:
        longest = source.max_length if source.max_length <= _LONG else longest
        shorter = [min(length, source.max_length) for length in shorter]
    ids = (rng.integers(0, source.vocab_size, length) for length in (longest, *shorter))
    return SourcedPlan(tokens, tuple(ids))


def sourced_logits(model: Any, family: Family, plan: SourcedPlan) -> list[Float32]:
    """Logits of the reference at the scored positions, one row at a time, [positions, V]."""
    found = []
    for row, scored, source in zip(
        plan.tokens.token_ids, plan.tokens.scored, plan.sources, strict=True
    ):
        name = "input_ids" if family.reads == "ids" else "input_features"
        given = {name: torch.from_numpy(source)[None]}
        ids = torch.from_numpy(row)[None]
        logits = run_reference(model, **given, decoder_input_ids=ids, use_cache=False).logits[0]
        found.append(logits[torch.from_numpy(scored)].float().numpy())
    return found


def prove_sources(bundle: Bundle, plan: SourcedPlan, reference: list[Float32]) -> Proof:
    """Run the bundle in every way, compare, and write its self-test.

    Raises:
        ParityError: If an answer differs by more than rounding explains.
    """
    try:
        runner = open_runner(bundle)
        assert isinstance(runner, PortableRunner)
        cases = {
            name: largest_error(runner, plan.tokens, reference, run(runner, plan))
            for name, run in track(_CASES.items(), "parity", unit="case")
        }
        finite = np.isfinite([*cases.values()]).all()
        manifest = write_selftest(bundle, runner=runner) if finite else bundle.manifest
    except RunError as error:
        raise ParityError(f"cannot run the written files: {error}") from error
    largest = max(float(np.abs(rows).max()) for rows in reference)
    limit = RELATIVE[bundle.manifest.model.dtype] * max(1.0, largest)
    positions = sum(len(scored) for scored in plan.tokens.scored)
    report = ParityReport(cases, limit, positions, largest, pieces=1)
    check_report(report)
    return Proof(report, manifest)


def _encode(runner: PortableRunner, sources: Sequence[Array]) -> list[Encoded]:
    assert runner.encoder is not None
    return runner.encoder.encode(sources)


def _each(encoded: Sequence[Encoded]) -> Callable[[Cache], None]:
    def prepare(cache: Cache) -> None:
        for row, source in enumerate(encoded):
            cache.sources.put(row, source)

    return prepare


def _alone(runner: PortableRunner, plan: SourcedPlan) -> list[Encoded]:
    return [_encode(runner, [source])[0] for source in plan.sources]


def _prompts_then_steps(runner: PortableRunner, plan: SourcedPlan) -> list[Float32]:
    tokens = plan.tokens
    return run_pieces(runner, tokens.token_ids, tokens.decode_cuts, _each(_alone(runner, plan)))


def _one_by_one(runner: PortableRunner, plan: SourcedPlan) -> list[Float32]:
    # The sources in one padded run.
    tokens, encoded = plan.tokens, _encode(runner, plan.sources)
    return run_pieces(runner, tokens.token_ids, tokens.single_cuts, _each(encoded))


def _one_source(runner: PortableRunner, plan: SourcedPlan) -> list[Float32]:
    # Each row beside itself, both reading one source as it is, as beams do.
    found = []
    for row, source in zip(plan.tokens.token_ids, _alone(runner, plan), strict=True):
        cuts = [np.array([len(row), 2]), np.array([len(row), len(row)])]
        prepare = _each([source, source])
        found.append(run_pieces(runner, (row, row), cuts, prepare)[1])
    return found


_CASES: dict[str, Callable[[PortableRunner, SourcedPlan], list[Float32]]] = {
    "prompts_then_steps": _prompts_then_steps,
    "one_by_one, sources in one batch": _one_by_one,
    "rows of one source": _one_source,
}
