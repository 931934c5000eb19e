"""One generator for many: the same tokens however they are asked for, how fast, and in what memory.

    python -m benchmarks.serving same [BUNDLE] [--prompts 200] [--tokens 64]
    python -m benchmarks.serving speed BUNDLE [--rows 16] [--tokens 64] [--rounds 3]
    python -m benchmarks.serving memory [BUNDLE] [--generations 10000]

`same` continues all prompts with each of twelve sets of parameters one by one, in batches of seven,
as seven streams at a time, and through the service with seven clients. Where tokens differ, the
logits of that step are perturbed by the largest difference that was measured between a run of one
row and a run of seven; a difference that this does not bring about fails the benchmark.
`speed` asks one by one and then all at once, in turns, and compares the tokens.
`memory` watches resident memory over many generations.
Without a bundle a tiny random model is exported and lowered first.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from headport.bundle import Bundle
from headport.runner import open_runner
from headport.runtime import Generation, Generator
from headport.runtime.generation_config import read_defaults
from headport.runtime.parameters import resolve
from headport.runtime.row import Row
from headport.runtime.sampling.choice import Choice
from headport.runtime.sampling.draws import choose_from, draw_of
from headport.runtime.text import TextStream, Tokens
from headport.runtime.vocabulary import IdMap
from headport.session import SessionSettings, library_version
from headport.slots import open_slots

__all__ = ["SETS", "main"]

SETS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"temperature": 1.0, "typical_p": 0.8, "min_new_tokens": 20},
    {"temperature": 1.1, "epsilon_cutoff": 0.002, "bad_words": [[7], [8, 9], [65, 66]]},
    {"temperature": 1.0, "eta_cutoff": 0.003, "logit_bias": {5: 2.0, 101: -5.0}},
    {"temperature": 1.5, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95},
    {"temperature": 1.0, "stop": ["e", "a t"], "frequency_penalty": -0.2},
    {"temperature": 0.9, "suppress_tokens": [1, 2, 3, 0], "begin_suppress_tokens": [60, 61]},
)
_TOGETHER = 7
_ATTEMPTS = 400  # perturbations of a row of logits
Way = Callable[[Generator, list[tuple[list[int], dict[str, Any]]]], list[list[int]]]


def _tiny(folder: Path) -> Path:
    from headport.export.command import Options as ExportOptions
    from headport.export.command import export
    from headport.lowering.command import Options as LowerOptions
    from headport.lowering.command import lower
    from tests.conftest import llama_config, save_model

    model = save_model(folder / "model", llama_config(max_position_embeddings=256))
    export(ExportOptions(model=str(model), output=folder / "portable"))
    options = LowerOptions(bundle=folder / "portable", output=folder / "lowered", target="ort-cpu")
    return lower(options).path


def _prompts(bundle: Bundle, count: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    size = bundle.manifest.vocabulary.size
    return [draw.integers(0, size, draw.integers(1, 48)).tolist() for _ in range(count)]


def _one_by_one(generator: Generator, asked: Any) -> list[list[int]]:
    return [generator.generate([prompt], **options)[0].token_ids for prompt, options in asked]


def _batches(generator: Generator, asked: Any) -> list[list[int]]:
    found: list[list[int]] = []
    for _, rows in groupby(asked, lambda each: each[1] | {"seed": 0}):  # a call has one set
        same_set = list(rows)
        for start in range(0, len(same_set), _TOGETHER):
            part = same_set[start : start + _TOGETHER]
            options = part[0][1] | {"seed": [each["seed"] for _, each in part]}
            found += [r.token_ids for r in generator.generate([p for p, _ in part], **options)]
    return found


def _streams(generator: Generator, asked: Any) -> list[list[int]]:
    def one(each: Any) -> list[int]:
        prompt, options = each
        return [token.token_id for token in generator.stream(prompt, **options)]

    with ThreadPoolExecutor(_TOGETHER) as pool:
        return list(pool.map(one, asked))


@contextmanager
def _service(generator: Generator) -> Iterator[int]:
    import socket

    import uvicorn

    from headport.runtime.serve.app import build_app

    server = uvicorn.Server(uvicorn.Config(build_app(generator, "model"), log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


def _through_service(generator: Generator, asked: Any) -> list[list[int]]:
    local = threading.local()

    def one(each: Any) -> list[int]:
        prompt, options = each
        fields = {k: v for k, v in options.items() if k != "max_new_tokens"}
        body = {"model": "model", "prompt": prompt, "return_token_ids": True, **fields}
        body["max_tokens"] = options["max_new_tokens"]
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection("127.0.0.1", port)
        local.connection.request("POST", "/v1/completions", json.dumps(body))
        answer = json.load(local.connection.getresponse())
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    with _service(generator) as port, ThreadPoolExecutor(_TOGETHER) as pool:
        return list(pool.map(one, asked))


class _Judge:
    """Whether rounding noise explains that two runs chose different tokens."""

    def __init__(self, bundle: Bundle, chunk: int, threads: int) -> None:
        self._bundle = bundle
        self._runner = open_runner(bundle, SessionSettings(threads=threads))
        self._ids = IdMap.from_bundle(bundle)
        self._chunk = chunk
        self.noise = 0.0

    def measure(self, sequences: Sequence[tuple[list[int], list[int]]]) -> None:
        """Largest |Δlogit| between steps of one row and of seven, on these (prompt, reply)."""
        for prompt, reply in sequences:
            alone, together = self._logits(prompt, reply, 1), self._logits(prompt, reply, _TOGETHER)
            self.noise = max(self.noise, float(np.abs(alone - together).max()))

    def _logits(self, prompt: list[int], reply: list[int], rows: int) -> Any:
        """Logits that each token of a reply but the first is chosen from, [tokens - 1, V]."""
        slots = open_slots(self._runner, rows, len(prompt) + len(reply))
        for row in range(rows):
            for start in range(0, len(prompt), self._chunk):
                piece = prompt[start : start + self._chunk]
                hidden = slots.forward([row], np.array([piece]), np.array([len(piece)]))
        states = [hidden[0, len(piece) - 1]]
        for token_id in reply[:-1]:
            ids = np.full((rows, 1), token_id)
            states.append(slots.forward(range(rows), ids, np.ones(rows, np.int64))[0, 0])
        return self._ids.rows(self._runner.full_logits(np.stack(states)))

    def explains(
        self, prompt: list[int], options: dict[str, Any], one: list[int], other: list[int]
    ) -> bool:
        """Perturb the logits of the first step that differs until the other token is chosen."""
        step = next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        logits = self._logits(prompt, one[: step + 1], 1)[step]
        request = resolve(options, read_defaults(self._bundle.manifest.defaults), 1)  # type: ignore[arg-type]
        seed = request.seeds[0] if request.seeds else None
        row = Row(0, prompt, request.parameters(len(one)), seed, TextStream(self._tokens), False)
        row.token_ids = one[:step]
        each = draw_of(row)
        assert not isinstance(each, Exception)
        draw = np.random.default_rng(0)
        for _ in range(_ATTEMPTS):
            shift = draw.uniform(-self.noise, self.noise, logits.shape).astype(np.float32)
            choice = choose_from(logits + shift, self._ids.ids, each)
            if isinstance(choice, Choice) and choice.token_id == other[step]:
                return True
        return False

    @property
    def _tokens(self) -> Tokens:
        return Tokens(self._bundle)


def _same(path: Path, prompts: int, tokens: int, threads: int) -> int:
    bundle = Bundle.open(path, verify=False)
    given = _prompts(bundle, prompts)
    asked = [
        (prompt, options | {"max_new_tokens": tokens} | {"seed": n})
        for options in SETS
        for n, prompt in enumerate(given)
    ]
    ways: dict[str, Way] = {
        "one by one": _one_by_one,
        f"batches of {_TOGETHER}": _batches,
        f"{_TOGETHER} streams at once": _streams,
        f"{_TOGETHER} clients of the service": _through_service,
    }
    found: dict[str, list[list[int]]] = {}
    for name, way in ways.items():
        start = time.perf_counter()
        generator = Generator(bundle, threads=threads)
        found[name] = way(generator, asked)
        seconds = time.perf_counter() - start
        count = sum(map(len, found[name]))
        print(f"{name:<28} {len(asked)} requests, {count} tokens, {seconds:.0f} s", flush=True)
        chunk = generator.stats.prefill_chunk
        generator.close()
    first, *others = found.values()
    judge = _Judge(bundle, chunk, threads)
    judge.measure([(p, r) for (p, _), r in zip(asked[::97], first[::97], strict=True)])
    print(f"largest |Δlogit| between one row and {_TOGETHER}: {judge.noise:.1e}")
    unexplained = 0
    for name, results in zip(list(found)[1:], others, strict=True):
        differ = [n for n, (a, b) in enumerate(zip(first, results, strict=True)) if a != b]
        for n in differ:
            prompt, options = asked[n]
            fits = judge.explains(prompt, options, first[n], results[n])
            unexplained += not fits
            print(f"  request {n} {options}: {'within' if fits else 'BEYOND'} the noise")
        print(f"{name}: {len(asked) - len(differ)} of {len(asked)} replies identical")
    return int(unexplained > 0)


@dataclass(frozen=True)
class _Timed:
    seconds: float
    replies: list[Generation]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(len(reply.token_ids) for reply in self.replies) / self.seconds


def _speed(path: Path, rows: int, tokens: int, rounds: int, threads: int) -> int:
    generator = Generator(path, verify=False, threads=threads, slots=rows)
    prompts = [prompt[:32] for prompt in _prompts(generator.bundle, rows)]
    options = [SETS[n % len(SETS)] | {"seed": n, "max_new_tokens": tokens} for n in range(rows)]
    # Ends of replies would differ from set to set, and with them the number of rows at a time.
    options = [each | {"eos_token_id": ()} for each in options]
    for each in options:
        each.pop("stop", None)

    def one(n: int) -> Generation:
        return generator.generate([prompts[n]], **options[n])[0]

    def timed(work: Callable[[], list[Generation]]) -> _Timed:
        start = time.perf_counter()
        replies = work()
        return _Timed(time.perf_counter() - start, replies)

    ratios, equal = [], True
    with ThreadPoolExecutor(rows) as pool:
        list(pool.map(one, range(2)))  # sessions and pages are warm
        for turn in range(rounds):
            alone = timed(lambda: [one(n) for n in range(rows)])
            together = timed(lambda: list(pool.map(one, range(rows))))
            ratios.append(together.rate / alone.rate)
            same = sum(a == b for a, b in zip(alone.replies, together.replies, strict=True))
            equal &= same == rows
            print(
                f"round {turn}: one by one {alone.rate:.1f} tokens/s, {rows} at once "
                f"{together.rate:.1f} tokens/s, {ratios[-1]:.2f} times; "
                f"{same} of {rows} replies identical",
                flush=True,
            )
    stats = generator.stats
    print(f"median {np.median(ratios):.2f} times; prefill and sampling included; {_machine()}")
    print(f"slots {stats.slots}, steps {stats.steps}, cache {stats.cache_bytes / 1e6:.0f} MB")
    return int(not equal)


def _memory(path: Path, generations: int, threads: int) -> int:
    generator = Generator(path, threads=threads)
    prompts = _prompts(generator.bundle, 64)
    process = psutil.Process()
    warm, seen = generations // 5, []
    for n in range(generations):
        options = SETS[n % len(SETS)] | {"max_new_tokens": 4, "min_new_tokens": 0, "seed": n}
        prompt = prompts[n % len(prompts)]
        if n % 3:
            generator.generate([prompt], **options)
        else:
            list(generator.stream(prompt, **options))
        if n >= warm and n % 100 == 0:
            gc.collect()
            seen.append(process.memory_info().rss)
    spread = (max(seen) - min(seen)) / min(seen)
    drift = (seen[-1] - seen[0]) / seen[0]
    print(
        f"{generations} generations, after {warm}: {seen[0] / 1e6:.1f} MB at first, "
        f"{seen[-1] / 1e6:.1f} MB at last ({drift:+.2%}), all within {spread:.2%}"
    )
    return int(abs(drift) > 0.01)


def _machine() -> str:
    return (
        f"{platform.machine()}, Python {platform.python_version()}, "
        f"ONNX Runtime {library_version()}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 where tokens differ beyond the noise, or memory grows."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("same", "speed", "memory"))
    parser.add_argument("bundle", nargs="?", type=Path, metavar="BUNDLE")
    defaults = {"prompts": 200, "tokens": 64, "rows": 16, "rounds": 3, "generations": 10_000}
    for name, default in (defaults | {"threads": 0}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    found = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = found.bundle or _tiny(Path(folder))
        if found.what == "same":
            return _same(path, found.prompts, found.tokens, found.threads)
        if found.what == "speed":
            return _speed(path, found.rows, found.tokens, found.rounds, found.threads)
        return _memory(path, found.generations, found.threads)


if __name__ == "__main__":
    sys.exit(main())
