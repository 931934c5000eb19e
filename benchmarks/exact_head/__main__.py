"""The exact INT8 head on SmolLM2 with an off-grid head: what it proves, says and costs.

`python -m benchmarks.exact_head --work FOLDER` prints
1. block × rows × bound × M: positions whose best token, and whose ten best, are proved, and the
   time of one head step beside plain INT8 + TopK and float32 + TopK;
2. mean KL and perplexity ratio of rescored logits against the original head, in float64;
3. argmax flips of the kernel's rounded activations, with one row and with residual rows.
`--hunt N` runs N adversarial rows and the texts' own positions through the shipped graphs and
counts false certificates. `--generate P` continues P prompts with `exact=True` and replays every
token on the float32 bundle. `--only` picks parts; `--kernels` lowers to headport's own kernels.
Bundles are made once and kept in FOLDER.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

from benchmarks.exact_head.bench import Bench
from benchmarks.exact_head.false_certificates import false_certificates
from benchmarks.exact_head.flips import flips
from benchmarks.exact_head.generation import MODES, generation
from benchmarks.exact_head.quality import quality
from benchmarks.exact_head.table import table
from headport.kernels import VARIABLE
from headport.session import library_version

_PARTS = ("table", "quality", "flips")


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(prog="benchmarks.exact_head", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("out/exact_head"))
    parser.add_argument("--positions", type=int, default=3000, help="positions of text")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=60, help="turns of the timing")
    parser.add_argument("--only", nargs="*", choices=_PARTS, default=_PARTS)
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 64, 128], help="of the table")
    parser.add_argument("--hunt", type=int, default=0, metavar="N", help="adversarial rows")
    parser.add_argument("--generate", type=int, default=0, metavar="P", help="prompts")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt")
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=tuple(MODES))
    parser.add_argument("--target", choices=("portable", "ort-cpu"), default="ort-cpu")
    parser.add_argument("--kernels", type=Path, metavar="FILE", help="headport's own")
    found = parser.parse_args()
    if found.kernels is not None:
        os.environ[VARIABLE] = str(found.kernels)
    found.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(found.work, found.positions, found.threads, found.kernels)
    print(
        f"{platform.machine()}, Python {platform.python_version()}, ONNX Runtime "
        f"{library_version()}, {time.strftime('%Y-%m-%d')}; SmolLM2-135M, noise on its head"
    )
    if "table" in found.only:
        table(bench, tuple(found.blocks), found.rounds)
    if "quality" in found.only:
        quality(bench)
    if "flips" in found.only:
        flips(bench)
    passed = True
    if found.hunt:
        passed &= false_certificates(bench, found.hunt)
    if found.generate:
        passed &= generation(bench, found.generate, found.tokens, found.target, tuple(found.modes))
    return 0 if passed else 1


sys.exit(main())
