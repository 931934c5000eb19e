"""The self-test a bundle carries: inputs, and the outputs its written files gave when made.

The same file can answer differently on another CPU, another ONNX Runtime or under other session
options. The head is fed the stored hidden states, so a difference names its part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headport.bundle import SELFTEST_FILE, Bundle
from headport.certificate import rounds_in_graph
from headport.certificate_check import CertificateCheck, check_certificate
from headport.encoder_runner import EncoderRunner, is_encoder
from headport.errors import BundleError
from headport.head_answers import answer
from headport.heads import HeadMethods
from headport.manifest import Manifest, SelftestTolerance
from headport.runner import Runner, open_runner
from headport.session import SessionSettings
from headport.session_runner import read_examples
from headport.source_encoder import example_sources

__all__ = ["SELFTEST_FILE", "SelftestResult", "run_selftest", "write_selftest"]

_SOURCE = "source."  # and its number
_HEAD_ROWS = 6
_LEADING = 8  # candidates kept
_PROMPT_LENGTHS = (9, 4)
# Relative to the largest magnitude. fp32 arithmetic on another CPU moves results by about 1e-6,
# fp16 by about 1e-3; rounding activations to INT8 moves logits by 3e-3 and more.
_RELATIVE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
# Where activations are rounded, another CPU's last bit may send one of them to the other neighbour.
_RELATIVE_ROUNDED = 2e-3
# In a backbone that goes on from layer to layer: of a 30-layer model, a prompt and the same tokens
# one by one differ by 0.025 of the largest.
_RELATIVE_ROUNDED_BACKBONE = 0.1

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SelftestResult:
    """Largest |Δ| between this machine and the stored outputs, and the accepted ones."""

    hidden_states_error: float  # hidden-state units
    logits_error: dict[str, float]  # logits, per head
    tolerance: SelftestTolerance
    certificates: dict[str, CertificateCheck]  # per certified head
    task_heads_error: dict[str, float] = field(default_factory=dict)  # per head, in its own units

    def __bool__(self) -> bool:
        accepted = self.tolerance
        errors = np.array([*self.logits_error.values()])
        others = self.task_heads_error.items()
        return bool(
            (self.logits_error or self.task_heads_error)
            and self.hidden_states_error <= accepted.hidden_states
            and (errors <= accepted.logits).all()
            and all(error <= accepted.task_heads[name] for name, error in others)
            and all(self.certificates.values())
        )


def write_selftest(
    bundle: Bundle,
    settings: SessionSettings | None = None,
    runner: Runner | EncoderRunner | None = None,
) -> Manifest:
    """Run the written files on fixed inputs and store what they gave; returns the manifest with it.

    Args:
        bundle: Not sealed yet.
        settings: How to open it.
        runner: The bundle, where it is open already.

    Raises:
        BundleError: If an output is not finite.
    """
    from safetensors.numpy import save_file

    arrays = _inputs(bundle.manifest)
    runner = runner or _open(bundle, settings)
    hidden = _hidden(runner, arrays)
    arrays["hidden_states"] = hidden
    for name in bundle.manifest.heads:
        arrays |= _head_arrays(runner, name, hidden[:_HEAD_ROWS])
    answers = _task_arrays(bundle, runner, hidden[:_HEAD_ROWS])
    for given in answers.values():
        arrays |= given
    broken = sorted(name for name, a in arrays.items() if not np.isfinite(a).all())
    if broken:
        raise BundleError(f"the written files give non-finite {', '.join(broken)}")
    save_file(arrays, bundle.path / SELFTEST_FILE)
    (bundle.path / SELFTEST_FILE).chmod(0o644)  # it comes readable by its owner alone
    relative = _RELATIVE[bundle.manifest.model.dtype]
    kept = {key for given in answers.values() for key in given}
    logits = [a for name, a in arrays.items() if name.endswith("logits") and name not in kept]
    rounded = bundle.manifest.target != "portable" and any(
        head.quantization is not None
        and head.quantization.activations == "rounded"
        and not rounds_in_graph(head)
        for head in bundle.manifest.heads.values()
    )
    of_logits = max(relative, _RELATIVE_ROUNDED) if rounded else relative
    of_hidden = relative
    if _rounds_in_backbone(bundle.manifest):
        of_hidden = max(relative, _RELATIVE_ROUNDED_BACKBONE)
    tolerance = SelftestTolerance(
        hidden_states=float(of_hidden * np.abs(hidden).max()),
        logits=float(of_logits * max((np.abs(a).max() for a in logits), default=0.0)),
        task_heads={
            name: float(relative * max(np.abs(a).max() for a in given.values()))
            for name, given in answers.items()
        },
    )
    return msgspec.structs.replace(bundle.manifest, selftest=tolerance)


def _rounds_in_backbone(manifest: Manifest) -> bool:
    record = manifest.backbone_quantization
    if record is None or manifest.target == "portable":
        return False
    stored = [how for how in record.matrices.values() if how.block is not None]
    return any(record.activations_of(how) == "rounded" for how in stored)


def run_selftest(
    bundle: Bundle,
    settings: SessionSettings | None = None,
    runner: Runner | EncoderRunner | None = None,
) -> SelftestResult:
    """Run the bundle's self-test on this machine.

    Args:
        bundle: The bundle.
        settings: How to open it.
        runner: What runs it in place of sessions opened here, such as its plans.

    Raises:
        BundleError: If the bundle carries none, or its file does not fit the bundle.
    """
    tolerance = bundle.manifest.selftest
    if tolerance is None:
        raise BundleError(f"{bundle.path} carries no self-test")
    stored = _load(bundle.path / SELFTEST_FILE)
    runner = runner or _open(bundle, settings)
    try:
        hidden = _hidden(runner, stored)
        hidden_error = _error(hidden, stored["hidden_states"])
        rows = stored["hidden_states"][:_HEAD_ROWS]
        logits_error = {
            name: _worst(_head_arrays(runner, name, rows), stored) for name in bundle.manifest.heads
        }
        task_heads_error = {
            name: _worst(found, stored)
            for name, found in _task_arrays(bundle, runner, rows).items()
        }
    except KeyError as error:
        raise BundleError(f"{SELFTEST_FILE}: no tensor {error} in it") from error
    certificates = {
        name: check_certificate(bundle, runner, name)
        for name, head in bundle.manifest.heads.items()
        if head.candidates is not None and head.candidates.certified
    }
    return SelftestResult(hidden_error, logits_error, tolerance, certificates, task_heads_error)


def _open(bundle: Bundle, settings: SessionSettings | None) -> Runner | EncoderRunner:
    if is_encoder(bundle.manifest):
        return EncoderRunner(bundle, settings)
    return open_runner(bundle, settings)


def _worst(found: dict[str, Array], stored: dict[str, Array]) -> float:
    return max(_error(array, stored[key]) for key, array in found.items())


def _load(path: Path) -> dict[str, Array]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise BundleError(f"{path}: cannot be read ({error})") from error


def _inputs(manifest: Manifest) -> dict[str, Array]:
    rng = np.random.Generator(np.random.Philox(key=0))
    width = min(max(_PROMPT_LENGTHS), manifest.model.max_context - 1)
    shape = (len(_PROMPT_LENGTHS), width)
    size = manifest.vocabulary.kept_size or manifest.vocabulary.size
    arrays = {
        "token_ids": rng.integers(0, size, shape),
        "lengths": np.minimum(np.array(_PROMPT_LENGTHS, np.int64), width),
        "next_token_ids": rng.integers(0, size, (shape[0], 1)),
    }
    sources = example_sources(manifest, rng)
    return arrays | {f"{_SOURCE}{n}": source for n, source in enumerate(sources)}


def _hidden(runner: Runner | EncoderRunner, arrays: dict[str, Array]) -> npt.NDArray[np.float32]:
    """Hidden states of a ragged prefill and one decode step, valid positions only, [N, H].

    Rows are ordered so that the first ones cover prefill and decode of both prompts. An encoder
    reads both texts at once, and no step.
    """
    lengths = arrays["lengths"]
    if isinstance(runner, EncoderRunner):
        texts = runner.encode(arrays["token_ids"], lengths)
        rows = [texts[b, :n][::-1] for b, n in enumerate(lengths)]
        return np.ascontiguousarray(np.concatenate(rows), dtype=np.float32)
    cache = runner.new_cache(len(lengths), int(lengths.max()) + 1)
    sources = [arrays[name] for name in sorted(arrays) if name.startswith(_SOURCE)]
    if sources:
        read_examples(runner, cache, sources)
    prompt = runner.forward(cache, arrays["token_ids"], lengths)
    step = runner.forward(cache, arrays["next_token_ids"], np.ones_like(lengths))
    rows = [step[:, 0], *(prompt[b, :n][::-1] for b, n in enumerate(lengths))]
    return np.ascontiguousarray(np.concatenate(rows), dtype=np.float32)


def _task_arrays(
    bundle: Bundle, runner: Runner | EncoderRunner, rows: npt.NDArray[np.float32]
) -> dict[str, dict[str, Array]]:
    """What every head that is not of a vocabulary says, by head and by the array's name."""
    if not isinstance(runner, HeadMethods):  # plans, which there are only of other heads
        return {}
    return {
        name: {f"{name}.{key}": a for key, a in answer(bundle, runner, name, rows).items()}
        for name in bundle.manifest.task_heads
    }


def _head_arrays(
    runner: Runner | EncoderRunner, name: str, rows: npt.NDArray[np.float32]
) -> dict[str, Array]:
    output = runner.head(rows, name)
    if output.logits is not None:
        return {f"{name}.logits": output.logits}
    assert output.candidates is not None
    found, quantised = output.candidates, runner.quantised(rows, name)
    # Ids, and the last candidates, may change with a kernel's last bit; leading logits may not.
    return {
        f"{name}.candidate_logits": np.ascontiguousarray(found.logits[:, :_LEADING]),
        f"{name}.logsumexp": found.logsumexp,
        f"{name}.quantised_logits": quantised.logits,
        f"{name}.upper_bounds": quantised.upper_bounds,
        f"{name}.full_logits": runner.full_logits(rows, name),
    }


def _error(found: Array, expected: Array) -> float:
    if found.shape != expected.shape:
        return float("inf")
    difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    return float(difference.max(initial=0.0)) if np.isfinite(difference).all() else float("inf")
