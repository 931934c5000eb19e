"""Where the time of an export goes, for models of 4, 8, 16 and 30 layers.

    python -m benchmarks.export.stages [--layers 4 8 16 30] [--small] [--json FILE]

Random Llamas of SmolLM2-135M's sizes (or, with `--small`, hidden size 64, where little but tracing
is left), each exported in a process of its own. Per stage: processor seconds of all threads,
which other programs on the machine change less than seconds on the wall. Stages are functions of
the exporter, timed around their calls; `rest` is what lies between them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["main"]

# stage → where the exporter looks its function up
_STAGES = {
    "hash of the checkpoint": "headport.export.assembly.checkpoint_sha256",
    "tokenizer": "headport.export.command.load_tokenizer",
    "loading": "headport.export.command.load_streamed",
    "head": "headport.export.subject.probe_head",
    "reference": "headport.export.subject.reference_logits",
    "torch.export": "torch.export.export",
    "translation": "headport.export.trace.translate",
    "optimisation": "headport.export.trace.optimize_graph",
    "finishing": "headport.export.trace.finish_graph",
    "writing": "headport.export.assembly.write_graphs",
    "checker": "headport.export.command.check_written",
    "parity and self-test": "headport.export.command.prove",
    "tokenizer check": "headport.export.command.check_tokenizer",
}


def _timed(function: Callable[..., Any], stage: str, found: dict[str, float]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            found[stage] = found.get(stage, 0.0) + time.process_time() - started

    return call


def _measure(model: str, output: str) -> dict[str, float]:
    # Runs in the child: imports, then one export.
    found: dict[str, float] = {}
    started = time.process_time()
    from headport.export.command import Options, export

    found["imports"] = time.process_time() - started
    for stage, place in _STAGES.items():
        target = mock.patch(place)
        function, _ = target.get_original()
        mock.patch(place, _timed(function, stage, found)).start()
    wall = time.monotonic()
    export(Options(model=model, output=Path(output)))
    found["rest"] = time.process_time() - started - sum(found.values())
    found["processor seconds"] = time.process_time() - started
    found["seconds on the wall"] = time.monotonic() - wall
    return found


def _save(folder: Path, layers: int, small: bool) -> None:
    from tests.conftest import llama_config, save_model

    sizes: dict[str, Any] = {}
    if not small:
        sizes = {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 2048,
        }
    save_model(folder, llama_config(num_hidden_layers=layers, tie_word_embeddings=True, **sizes))


def main(arguments: list[str] | None = None) -> int:
    """Print a table, stages down, layers across."""
    parser = argparse.ArgumentParser(description="Where the time of an export goes.")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 30])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--model", help="a checkpoint of your own, instead of random ones")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if found.child:
        print(json.dumps(_measure(*found.child)))
        return 0
    table: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for layers in [0] if found.model else found.layers:
            model = Path(found.model or Path(scratch) / f"{layers}")
            if not found.model:
                _save(model, layers, found.small)
            child = ["--child", str(model), str(Path(scratch) / f"bundle{layers}")]
            command = [sys.executable, "-m", "benchmarks.export.stages", *child]
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            table[found.model or f"{layers} layers"] = json.loads(answer.splitlines()[-1])
    stages = list(dict.fromkeys(stage for column in table.values() for stage in column))
    print(f"{'':24}" + "".join(f"{Path(name).name:>14}" for name in table))
    for stage in stages:
        print(f"{stage:24}" + "".join(f"{c.get(stage, 0.0):14.2f}" for c in table.values()))
    if found.json:
        found.json.write_text(json.dumps(table, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
