"""How step, prompt and memory grow with the model and with what it is asked.

    python -m benchmarks.scale [PART...] [--bundle BUNDLE] [--weights int8] [--threads 2]
        [--rounds 12] [--requests 300]

Parts `vocabulary`, `hidden`, `layers` and `large` (262,144 × 640, 18 layers) make random models in
a temporary folder and compare them; `context`, `batch`, `requests` and `memory` look at one bundle,
by default a random one. Steps are timed in turns, behind 256 tokens, backbone and head, up to
logits on the host; prompts run in pieces, as `Generator` runs them. Exit code 1 where a part that
has a limit is above it:

    context    a token further back adds no more in the longer half than 1.25 × in the shorter
    batch      a row of several costs no more than one alone
    requests   a process that has answered many requests is as fast as a fresh one, its memory flat
    memory     at most 1.15 × (weights + caches) + an empty session
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.scale.context import grows_with_batch, grows_with_context
from benchmarks.scale.earlier import independent_of_earlier_requests
from benchmarks.scale.models import Sizes, bundle_of
from benchmarks.scale.resident import within_its_parts
from benchmarks.scale.sizes import GROWING, compare_sizes
from headport.progress import set_quiet
from headport.session import library_version

__all__ = ["main"]

_ONE = Sizes(vocab=32_768, hidden=768, layers=12, context=8192)
_OF_ONE = ("context", "batch", "requests", "memory")


def main(arguments: list[str] | None = None) -> int:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = (*GROWING, *_OF_ONE)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}")
    parser.add_argument("--bundle", type=Path, help="lowered; what the last four parts look at")
    parser.add_argument("--weights", choices=("fp32", "int8", "int4"), default="int8")
    for name, default in (("threads", 2), ("rounds", 12), ("requests", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    found = parser.parse_args(arguments)
    if odd := [part for part in found.parts if part not in parts]:
        parser.error(f"unknown parts {', '.join(odd)}; choose from {', '.join(parts)}")
    chosen = found.parts or parts
    set_quiet(True, json_on_stdout=False)
    work = Path(tempfile.mkdtemp(prefix="scale-"))
    passed = True
    try:
        bundle = found.bundle
        if bundle is None and set(chosen) & set(_OF_ONE):
            bundle = bundle_of(_ONE, work, found.weights)
        for part in chosen:
            started = time.monotonic()
            print(f"\n## {part}\n")
            passed &= _action(part, bundle, found)()
            print(f"({time.monotonic() - started:.0f} s)")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(
        f"\n{'the bundle given' if found.bundle else found.weights}, {found.threads} threads, "
        f"{found.rounds} rounds; ONNX Runtime {library_version()}, {platform.machine()}"
    )
    return 0 if passed else 1


def _action(part: str, bundle: Path, found: argparse.Namespace) -> Callable[[], bool]:
    if part in GROWING:
        return partial(compare_sizes, GROWING[part], found.weights, found.threads, found.rounds)
    actions = {
        "context": partial(grows_with_context, bundle, found.threads, found.rounds),
        "batch": partial(grows_with_batch, bundle, found.threads, found.rounds),
        "requests": partial(
            independent_of_earlier_requests, bundle, found.threads, found.rounds, found.requests
        ),
        "memory": partial(within_its_parts, bundle, found.threads),
    }
    return actions[part]


if __name__ == "__main__":
    sys.exit(main())
