"""A random model whose head outweighs its backbone: pruned by headport, and whole for the peers.

    python -m benchmarks.large_vocabulary FOLDER [--genai-python PYTHON]
        [--vocab 262144] [--hidden 640] [--layers 18] [--kept 16384] [--backbone int8 int4]
        [--backbone-block 64] [--head int8] [--kernels FILE]

writes the checkpoint (sizes of Gemma 3 270M, as a Llama), bundles pruned to `--kept` tokens (the
input embedding stays whole, replies are limited), one for each `--backbone`, each lowered to
`ort-cpu`, with headport's own kernels where their library is given; and,
where an interpreter with ONNX Runtime GenAI is given, what its builder makes of the whole
checkpoint at int4. Prints the command of `benchmarks.peers` that runs them side by side. Weights
are random, so nothing is said about quality; what the kept tokens are makes no difference to speed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.synthetic import write_checkpoint
from benchmarks.tree import run_command

__all__ = ["main"]

_HEADPORT = (sys.executable, "-m", "headport")


def main(arguments: list[str] | None = None) -> int:
    """Write what is missing and print how to measure it."""
    parser = argparse.ArgumentParser(prog="benchmarks.large_vocabulary", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--genai-python", metavar="PYTHON")
    for name, default in (("vocab", 262_144), ("hidden", 640), ("layers", 18), ("kept", 16_384)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backbone", nargs="+", choices=("int8", "int4"), default=["int8", "int4"])
    parser.add_argument("--backbone-block", default="64")
    parser.add_argument("--head", choices=("int8", "int4"), default="int8")
    parser.add_argument("--kernels", metavar="FILE")
    found = parser.parse_args(arguments)
    folder: Path = found.folder
    checkpoint = folder / "checkpoint"
    if not checkpoint.is_dir():
        checkpoint.mkdir(parents=True)
        write_checkpoint(
            checkpoint,
            vocab_size=found.vocab,
            hidden_size=found.hidden,
            intermediate_size=16 * found.hidden // 5,
            num_hidden_layers=found.layers,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            max_position_embeddings=4096,
        )
    bundles = []
    for backbone in found.backbone:
        name = f"{backbone}-{found.backbone_block}-head-{found.head}"
        quantize = ("--backbone", backbone, "--backbone-block", found.backbone_block)
        quantize += ("--head", found.head)
        made = _bundle(
            folder, checkpoint, found.kept, name, quantize=quantize, kernels=found.kernels
        )
        bundles.append(made)
    shutil.rmtree(folder / "pruned", ignore_errors=True)
    command = [*("python", "-m", "benchmarks.peers"), *map(str, bundles)]
    if found.genai_python:
        command += ["--genai", str(_genai(folder, checkpoint, found.genai_python))]
        command += ["--peer-python", found.genai_python]
    print(shlex.join(command))
    return 0


def _bundle(
    folder: Path,
    checkpoint: Path,
    kept: int,
    name: str,
    *,
    quantize: tuple[str, ...],
    kernels: str | None,
) -> Path:
    target = folder / (f"{name}-own" if kernels else name)
    if target.is_dir():
        return target
    whole, pruned, portable = folder / "whole", folder / "pruned", folder / f"portable-{name}"
    if not pruned.is_dir() and not portable.is_dir():
        keep = folder / "keep.txt"
        keep.write_text("".join(f"id:{n}\n" for n in range(kept)), encoding="utf-8")
        _run("export", str(checkpoint), "-o", str(whole))
        _run("prune", str(whole), "-o", str(pruned), "--keep", str(keep))
        shutil.rmtree(whole)
    if not portable.is_dir():
        _run("quantize", str(pruned), "-o", str(portable), *quantize)
    own = ("--kernels", kernels) if kernels else ()
    _run("lower", str(portable), "-o", str(target), "--target", "ort-cpu", *own)
    return target


def _genai(folder: Path, checkpoint: Path, python: str) -> Path:
    target = folder / "genai"
    if not target.is_dir():
        builder = (python, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint))
        _must((*builder, "-o", str(target), "-p", "int4", "-e", "cpu", "-c", str(folder / "cache")))
    return target


def _run(*arguments: str) -> None:
    _must((*_HEADPORT, *arguments, "--quiet"))


def _must(command: Sequence[str]) -> None:
    print(shlex.join(command), file=sys.stderr)
    done = run_command(command)
    if done.exit_code:
        raise SystemExit(f"{done.command}\n{done.output}")


if __name__ == "__main__":
    sys.exit(main())
