"""The C++ library against Python: the same seed, the same tokens.

    python -m benchmarks.cpp_same [BUNDLE ...] [--prompts 200] [--tokens 64] [--part A/B]

Each `ort-cpu` bundle continues all prompts with twelve sets of parameters: in C++ one row at a time
and in batches of seven, in Python in as many slots as it takes. The C++ program runs alone: its
replies are written to a file, and compared once Python has made its own. Without a bundle a tiny
random model is exported, full and pruned, each with a float head and with a plain and an exact INT8
one. The program is that of the C++ tests:

    cmake -S runtime/cpp -B build/cpp && cmake --build build/cpp --target run_requests

Exit status 1 where any reply differs.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving import SETS
from benchmarks.tiny import part_of
from headport.bundle import Bundle
from headport.runtime import Generator
from headport.session import library_version

__all__ = ["main"]

_ROWS = (1, 7)  # that C++ works on at once
_PROGRAM = Path(__file__).parents[1] / "build" / "cpp" / "tests" / "run_requests"
# Stop texts need a tokenizer, which the program has no use for.
_SETS = tuple({name: each for name, each in row.items() if name != "stop"} for row in SETS)


def _tiny(folder: Path) -> dict[str, Path]:
    """`ort-cpu` bundles by what is particular about them."""
    from headport.export.command import Options as ExportOptions
    from headport.export.command import export
    from headport.lowering.command import Options as LowerOptions
    from headport.lowering.command import lower
    from headport.quantize import Options as QuantizeOptions
    from headport.quantize import quantize
    from headport.quantize.prune import Options as PruneOptions
    from headport.quantize.prune import prune
    from tests.conftest import llama_config, save_model
    from tests.quantize.prune.tokenizers_of import byte_level
    from tests.quantize.prune.toys import count_texts

    tokenizer = byte_level()  # of more tokens than bytes, so that some can be cut
    size = tokenizer.get_vocab_size()
    model = save_model(folder / "model", llama_config(max_position_embeddings=256, vocab_size=size))
    tokenizer.save(str(model / "tokenizer.json"))
    full = export(ExportOptions(model=str(model), output=folder / "full"))
    counts = count_texts(folder / "counts.parquet", full)
    pruned = prune(
        PruneOptions(
            bundle=full.path, output=folder / "pruned", counts=counts, least=1, mode="output"
        )
    )
    heads: dict[str, dict[str, Any]] = {
        "fp32": {},
        "int8": {"head": "int8", "block": 16},
        "exact int8": {"head": "int8", "block": 16, "certify": True},
    }
    found = {}
    for vocabulary, bundle in (("full", full), ("pruned", pruned)):
        for head, options in heads.items():
            name = f"{vocabulary}, {head}"
            source = bundle.path
            if options:
                output = folder / f"{name} portable"
                source = quantize(QuantizeOptions(bundle=source, output=output, **options)).path
            found[name] = lower(
                LowerOptions(bundle=source, output=folder / name, target="ort-cpu")
            ).path
    return found


def _prompts(bundle: Path, count: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    size = Bundle.open(bundle, verify=False).manifest.vocabulary.size
    return [draw.integers(0, size, draw.integers(1, 48)).tolist() for _ in range(count)]


def _requests(prompts: list[list[int]], tokens: int, part: str) -> list[dict[str, Any]]:
    seeds = list(range(len(prompts)))
    return [
        {"prompts": prompts, "options": row | {"max_new_tokens": tokens, "seed": seeds}}
        for row in part_of(_SETS, part)
    ]


def _in_cpp(bundle: Path, requests: list[dict[str, Any]], rows: int) -> list[list[int]]:
    spec = find_spec("onnxruntime")
    assert spec is not None and spec.origin is not None
    library = next((Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*"))
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "requests.json", Path(folder) / "replies.json"
        asked.write_text(json.dumps([_written(each) for each in requests]))
        command = [_PROGRAM, bundle, asked, answered, str(rows)]
        subprocess.run(command, env={"HEADPORT_ORT": str(library)}, check=True)
        found = json.loads(answered.read_text())["requests"]
    return [reply["token_ids"] for each in found for reply in each["replies"]]


def _written(request: dict[str, Any]) -> dict[str, Any]:
    options = dict(request["options"])
    if "logit_bias" in options:
        options["logit_bias"] = [[[token], bias] for token, bias in options["logit_bias"].items()]
    return request | {"options": options}


def _in_python(bundle: Path, requests: list[dict[str, Any]]) -> list[list[int]]:
    with Generator(bundle, threads=1) as generator:
        return [
            reply.token_ids
            for each in requests
            for reply in generator.generate(each["prompts"], **each["options"])
        ]


def _compare(name: str, bundle: Path, requests: list[dict[str, Any]]) -> int:
    found, seconds = {}, {}
    for rows in _ROWS:
        start = time.perf_counter()
        found[rows] = _in_cpp(bundle, requests, rows)
        seconds[rows] = time.perf_counter() - start
    start = time.perf_counter()
    expected = _in_python(bundle, requests)
    tokens = sum(map(len, expected))
    print(
        f"{name}: {len(expected)} replies, {tokens} tokens; Python "
        f"{time.perf_counter() - start:.0f} s",
        flush=True,
    )
    different = 0
    for rows, replies in found.items():
        same = sum(one == other for one, other in zip(replies, expected, strict=True))
        different += len(expected) - same
        print(f"  C++, {rows} rows at a time: {same} identical, {seconds[rows]:.0f} s", flush=True)
    return different


def main(arguments: list[str] | None = None) -> int:
    """Compare and print; 1 where a reply differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", nargs="*", type=Path, metavar="BUNDLE")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--part", default="", metavar="A/B", help="every B-th set from the A-th on")
    options = parser.parse_args(arguments)
    if not _PROGRAM.is_file():
        parser.error(f"{_PROGRAM} was expected; build it as `--help` says")
    with tempfile.TemporaryDirectory() as folder:
        bundles = {path.name: path for path in options.bundles} or _tiny(Path(folder))
        different = 0
        for name, bundle in bundles.items():
            prompts = _prompts(bundle, options.prompts)
            requests = _requests(prompts, options.tokens, options.part)
            different += _compare(name, bundle, requests)
    print(
        f"{options.prompts} prompts, up to {options.tokens} tokens, ONNX Runtime "
        f"{library_version()}, Python {platform.python_version()}, {platform.machine()}"
    )
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
