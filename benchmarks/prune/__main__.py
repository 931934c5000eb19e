"""Pruning on SmolLM2: a table of domains, the speed of counting, a large corpus.

    python -m benchmarks.prune --work FOLDER [--only table speed big] [--corpus-gb 1]

exports SmolLM2-135M once, counts Python code, medical terms and Chinese with a fifth held out, and
prunes to each of --sizes in each of --modes. `speed` counts the same corpora side by side with the
tokenizer's `encode_batch`; `big` makes a corpus of --corpus-gb, watches the memory of counting it,
and kills and resumes a second run. Chinese text comes from Debian's `fortunes-zh`.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path

from benchmarks.material import smollm2
from benchmarks.prune.big import big_corpus
from benchmarks.prune.speed import counting_speed
from benchmarks.prune.table import Case, domain_table
from benchmarks.prune.texts import CHINESE, DOMAINS, write_corpus
from headport.export.command import Options, export
from headport.session import library_version

_PARTS = ("table", "speed", "big")
_LEAST_RATIO = 3.0


def main() -> int:
    """Print what was asked for; fails where counting is not three times as fast."""
    parser = argparse.ArgumentParser(prog="benchmarks.prune", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("out/prune"))
    parser.add_argument("--bundle", type=Path, help="portable bundle (default: exports SmolLM2)")
    parser.add_argument("--reference", help="its checkpoint (default: SmolLM2's GGUF)")
    parser.add_argument("--only", nargs="*", choices=_PARTS, default=_PARTS)
    parser.add_argument("--domains", nargs="+", choices=tuple(DOMAINS), default=tuple(DOMAINS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[2048, 4096, 8192, 0])
    parser.add_argument("--modes", nargs="+", default=["output", "both"])
    parser.add_argument("--max-tokens", type=int, default=2000, help="held-out tokens per domain")
    parser.add_argument("--corpus-gb", type=float, default=1.0, help="of the large corpus")
    parser.add_argument("--chinese", type=Path, default=CHINESE)
    found = parser.parse_args()
    found.work.mkdir(parents=True, exist_ok=True)
    bundle, reference = found.bundle, found.reference or str(smollm2())
    if bundle is None:
        bundle = found.work / "bundle"
        if not bundle.exists():
            export(Options(model=reference, output=bundle))
    print(
        f"{platform.machine()}, Python {platform.python_version()}, ONNX Runtime "
        f"{library_version()}, {time.strftime('%Y-%m-%d')}; {bundle.name}, portable\n"
    )
    corpora = [
        write_corpus(domain, found.work / f"{domain}.jsonl", found.chinese)
        for domain in found.domains
    ]
    passed = True
    if "table" in found.only:
        case = Case(
            bundle=bundle,
            reference=reference,
            work=found.work,
            sizes=tuple(found.sizes),
            modes=tuple(found.modes),
            max_tokens=found.max_tokens,
            chinese=found.chinese,
        )
        domain_table(case, found.domains)
    if "speed" in found.only:
        passed &= counting_speed(bundle, corpora) >= _LEAST_RATIO
    if "big" in found.only:
        big_corpus(bundle, corpora, found.work, int(found.corpus_gb * 1e9))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
