"""One candidate, measured in a process of its own: `python -m headport.runtime.tuning.measure`.

Memory that one process was given, and threads that another one left, change times by as much as
what is compared here; a fresh process for each run leaves chance to do that evenly.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import BundleError, HeadportError
from headport.runner import Runner, open_runner
from headport.runtime.decoder_start import START_FIELDS
from headport.runtime.generator import Generator
from headport.runtime.inputs import Input
from headport.runtime.results import Token
from headport.runtime.tuning.candidates import Candidate
from headport.runtime.tuning.table import Measured
from headport.session import SessionSettings
from headport.session_runner import read_examples
from headport.source_encoder import example_sources

__all__ = ["Task", "measure_apart", "measure_here"]

_WARM_UP_STEPS = 4  # in a request of their own
_FIRST_STEPS = 2  # of a request, which find caches cold
_COMPARED_STEPS = 4
_SEED = 0


class Task(msgspec.Struct, frozen=True):
    """What is measured of every candidate."""

    bundle: str
    head: str
    prompt: int  # tokens
    steps: int  # tokens after the first


def measure_apart(task: Task, candidate: Candidate) -> Measured:
    """Measure one candidate in a process of its own.

    Raises:
        BundleError: If that process fails; with what it said.
    """
    command = [sys.executable, "-m", __name__, *map(_json, (task, candidate))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        code = done.returncode
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = (done.stderr.strip().splitlines() or [f"it ended by {ended} without a message"])[-1]
        raise BundleError(f"{task.bundle}: with {candidate.text()} it does not run: {last}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Measured)


def measure_here(task: Task, candidate: Candidate) -> Measured:
    """Measure one candidate in this process, as `Generator` runs a single request.

    Raises:
        HeadportError: If the bundle does not load or does not run.
    """
    bundle = Bundle.open(task.bundle, verify=False)  # whoever asks has compared checksums
    settings = SessionSettings(threads=candidate.threads, spinning=candidate.spinning)
    runner = open_runner(bundle, settings, (task.head,))
    prompt = _prompt(bundle, task.prompt)
    answers = hashlib.sha256()
    for array in _outputs(bundle, runner, task):
        answers.update(array.tobytes())
    # Greedy and without end, whatever the checkpoint's defaults are.
    own = {k: v for k, v in bundle.manifest.defaults.items() if k in START_FIELDS}
    plain = replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, defaults=own))
    with Generator(
        plain,
        head=task.head,
        slots=1,
        max_context=_context(bundle, task),
        prefix_reuse=False,
        runner=runner,
    ) as generator:
        _request(generator, prompt, min(_WARM_UP_STEPS, task.steps))
        prompt_ms, decode_ms, tokens = _request(generator, prompt, task.steps)
    answers.update(_json(tokens).encode())
    return Measured(decode_ms, prompt_ms, answers.hexdigest())


def _request(generator: Generator, prompt: Input, steps: int) -> tuple[float, float, list[int]]:
    """Milliseconds to the first token, of a step after it, and the tokens."""
    times: list[float] = []

    def listen(_: int, token: Token) -> None:
        del token
        times.append(time.perf_counter())

    started = time.perf_counter()
    options: dict[str, Any] = {"max_new_tokens": steps + 1, "eos_token_id": ()}
    [reply] = generator.submit([prompt], listener=listen, **options).result()
    gaps = [1e3 * (after - before) for before, after in pairwise(times)]
    return 1e3 * (times[0] - started), median(gaps[_FIRST_STEPS:] or gaps), reply.token_ids


def _context(bundle: Bundle, task: Task) -> int:
    """Tokens that a slot must hold."""
    model = bundle.manifest.model
    if bundle.manifest.source is not None:  # its replies begin with tokens of the model's own
        return model.max_context
    return min(task.prompt + task.steps + 1, model.max_context)


def _prompt(bundle: Bundle, count: int) -> Input:
    """Random tokens, or a random source where the bundle answers to sources."""
    rng = np.random.default_rng(_SEED)
    sources = example_sources(bundle.manifest, rng)
    if sources:
        first = sources[0]
        return first if first.dtype.kind == "f" else first.tolist()
    found: list[int] = rng.integers(0, bundle.manifest.vocabulary.size, count).tolist()
    return found


def _outputs(bundle: Bundle, runner: Runner, task: Task) -> list[npt.NDArray[Any]]:
    """Hidden states of a prompt and of steps after it, and what the head says of them."""
    manifest = bundle.manifest
    rng = np.random.default_rng(_SEED)
    size = manifest.vocabulary.kept_size or manifest.vocabulary.size
    steps = min(_COMPARED_STEPS, task.steps)
    ids = rng.integers(0, size, (1, task.prompt + steps))
    cache = runner.new_cache(1, task.prompt + steps)
    sources = example_sources(manifest, rng)
    if sources:
        read_examples(runner, cache, sources[:1])
    parts = [ids[:, : task.prompt], *np.split(ids[:, task.prompt :], steps, axis=1)]
    found: list[npt.NDArray[Any]] = []
    for part in parts:
        hidden = runner.forward(cache, part, np.array([part.shape[1]]))[0]
        output = runner.head(hidden[-1:], task.head)
        found += [hidden] if output.logits is None else [hidden, output.logits]
        if output.candidates is not None:
            found += [output.candidates.ids, output.candidates.logits, output.candidates.logsumexp]
    return found


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


if __name__ == "__main__":
    _task, _candidate = sys.argv[1:]
    try:
        _found = measure_here(
            msgspec.json.decode(_task, type=Task), msgspec.json.decode(_candidate, type=Candidate)
        )
    except HeadportError as _error:
        sys.exit(str(_error))
    sys.stdout.write(_json(_found) + "\n")
