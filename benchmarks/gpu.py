"""What bundles do on a GPU machine: lowered there to `ort-cuda`, checked, measured.

    python -m benchmarks.gpu make FOLDER BUNDLE …      portable bundles, packed to be carried
    python -m benchmarks.gpu run FOLDER -o RESULTS     on the GPU machine

Large bundles are carried without their weights: `run` writes those from a checkpoint (`--gguf` or
`--checkpoint`), and the bundle's own checksums prove that they are the same bytes. Every command is
a process of its own, so that a kernel that crashes ends one row and not the table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headport.manifest import Manifest, Tensor, decode_manifest

_CARRIED_BYTES = 4 << 20  # weights of a bundle that travel with it; larger ones are written there
_TRANSPOSED = ".transposed"
_COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Row:
    """One way to quantise and check a bundle."""

    name: str
    quantize: tuple[str, ...] = ()  # options of `quantize`; none: the head stays as it is
    needs_dtype: str = ""
    check: tuple[str, ...] = ()  # options of `gpu-check`


ROWS = (
    Row("plain"),
    Row("int8", ("--head", "int8")),
    Row("certified", ("--head", "int8", "--rescore", "64", "--certify")),
)


def make(folder: Path, bundles: Sequence[Path]) -> None:
    """Copy portable bundles, large ones without their weights."""
    for bundle in bundles:
        target = folder / bundle.name
        shutil.copytree(bundle, target)
        data = sorted((target / "data").glob("*.bin"))
        size = sum(file.stat().st_size for file in data)
        if size > _CARRIED_BYTES:
            for file in data:
                file.unlink()
        print(f"{bundle.name}: {size / 1e6:.1f} MB of weights{_carried(size)}")
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{total / 1e6:.1f} MB in {folder}")


def _carried(size: int) -> str:
    return ", left behind" if size > _CARRIED_BYTES else ""


def restore(bundle: Path, checkpoint: Path) -> None:
    """Write a carried bundle's weights from a Hugging Face folder.

    A tensor of the ledger is a parameter of the checkpoint, as it is or transposed, in the ledger's
    element type.

    Raises:
        KeyError: If the checkpoint has no such parameter.
    """
    from safetensors import safe_open

    manifest = decode_manifest((bundle / "manifest.json").read_bytes(), "manifest.json")
    (bundle / "data").mkdir(exist_ok=True)
    with safe_open(checkpoint / "model.safetensors", framework="numpy") as source:
        for file, tensors in _by_file(manifest).items():
            with (bundle / file).open("wb") as stream:
                for tensor in tensors:
                    stream.write(b"\0" * (tensor.offset - stream.tell()))
                    stream.write(_value(source, tensor).tobytes())


def _by_file(manifest: Manifest) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for tensor in sorted(manifest.tensors, key=lambda tensor: tensor.offset):
        found.setdefault(tensor.file, []).append(tensor)
    return found


def _value(source: Any, tensor: Tensor) -> np.ndarray:
    names = (tensor.name, *(consumer.split(":", 1)[1] for consumer in tensor.consumers))
    known = set(source.keys())
    name = next(n for n in names if n.removesuffix(_TRANSPOSED) in known)
    value = source.get_tensor(name.removesuffix(_TRANSPOSED))
    value = value.T if name.endswith(_TRANSPOSED) else value
    dtype = {"float": np.float32, "float16": np.float16}[tensor.dtype]
    return np.ascontiguousarray(value, dtype)


def checkpoint_from_gguf(gguf: Path, bundle: Path, folder: Path) -> Path:
    """A Hugging Face folder: a GGUF file's weights in float32, the rest from the bundle."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    tied = set() if model.config.tie_word_embeddings is False else {"lm_head.weight"}
    weights = {n: w.float().contiguous() for n, w in model.state_dict().items() if n not in tied}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in _COMPANIONS:
        shutil.copy(bundle / name, folder / name)
    return folder


class Table:
    """Commands run one after the other until the time is up; written after each."""

    def __init__(self, output: Path, seconds: float) -> None:
        self._output = output
        self._end = time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []

    def run(self, name: str, *command: str, limit: float = 150) -> bool:
        """Run `python -m headport COMMAND`; whether it gave 0."""
        left = self._end - time.monotonic()
        if left < 5:
            self._add(name=name, code=None, seconds=0.0, output="no time was left")
            return False
        started = time.monotonic()
        try:
            found = subprocess.run(
                [sys.executable, "-m", "headport", *command],
                capture_output=True,
                text=True,
                timeout=min(limit, left),
                check=False,
            )
            code, text = found.returncode, found.stdout + found.stderr
        except subprocess.TimeoutExpired as error:
            code, text = -1, f"stopped after {error.timeout:.0f} s"
        seconds = round(time.monotonic() - started, 1)
        self._add(name=name, code=code, seconds=seconds, output=text[-6000:])
        return code == 0

    def _add(self, **row: Any) -> None:
        self.rows.append(row)
        print(
            f"--- {row['name']}: {row['code']} in {row['seconds']} s\n{row['output']}", flush=True
        )
        self._output.mkdir(parents=True, exist_ok=True)
        (self._output / "table.json").write_text(json.dumps(self.rows, indent=1), encoding="utf-8")


def run(options: argparse.Namespace) -> int:
    """Lower and check every bundle of the folder; 1 if a command failed."""
    table = Table(options.output, options.seconds)
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    table.run("doctor", "doctor")
    reference = options.checkpoint
    bundles = list(_bundles(options.folder, options.only))
    light = next((b for b in bundles if not list((b / "data").glob("*.bin"))), None)
    if options.gguf is not None and light is not None:
        reference = checkpoint_from_gguf(options.gguf, light, work / "checkpoint")
    for bundle in bundles:
        source = work / bundle.name
        shutil.copytree(bundle, source, dirs_exist_ok=True)
        against: tuple[str, ...] = ()
        if not (source / "data").is_dir() or not list((source / "data").glob("*.bin")):
            if reference is None:
                print(f"{bundle.name}: needs --gguf or --checkpoint")
                continue
            restore(source, reference)
            texts = [str(text) for text in options.text]
            against = ("--reference", str(reference), "--text", *texts) if texts else ()
        for row in ROWS:
            if not options.rows or row.name in options.rows:
                _check(table, source, row, against)
    failed = [row["name"] for row in table.rows if row["code"] != 0 and row["name"] != "doctor"]
    print(f"{len(table.rows)} commands, not 0: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _bundles(folder: Path, only: Sequence[str]) -> Iterator[Path]:
    """Bundles of a folder, or those named, in that order."""
    names = only or sorted(manifest.parent.name for manifest in folder.glob("*/manifest.json"))
    yield from (folder / name for name in names)


def _check(table: Table, source: Path, row: Row, against: tuple[str, ...]) -> None:
    name = f"{source.name}-{row.name}"
    portable, lowered = source, source.with_name(f"{name}-cuda")
    manifest = msgspec.json.decode((source / "manifest.json").read_bytes())
    if row.quantize:
        portable = source.with_name(f"{name}-portable")
        command = ("quantize", str(source), "-o", str(portable), "--force", *row.quantize)
        if not table.run(f"{name} quantize", *command):
            return
    target = ("--target", "ort-cuda", "--force")
    if not table.run(f"{name} lower", "lower", str(portable), "-o", str(lowered), *target):
        return
    growing = ("--cpu-fallback",) if manifest["model"]["dtype"] == "fp32" else ()
    report = table._output / f"{name}.json"
    table.run(
        f"{name} gpu-check",
        "gpu-check",
        str(lowered),
        *("-o", str(report), "--force"),
        *against,
        *growing,
        *row.check,
        limit=240,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    first = verbs.add_parser("make")
    first.add_argument("folder", type=Path)
    first.add_argument("bundles", type=Path, nargs="+")
    second = verbs.add_parser("run")
    second.add_argument("folder", type=Path)
    second.add_argument("-o", "--output", type=Path, required=True, help="folder of results")
    second.add_argument("--work", type=Path, default=Path("gpu-work"), help="folder of bundles")
    second.add_argument("--gguf", type=Path, help="checkpoint to restore weights from")
    second.add_argument("--checkpoint", type=Path, help="the same as a Hugging Face folder")
    second.add_argument("--text", type=Path, nargs="*", default=[], help="texts to compare on")
    second.add_argument("--only", nargs="*", default=[], help="names of bundles")
    second.add_argument("--rows", nargs="*", default=[], help="of plain, int8, certified")
    second.add_argument("--seconds", type=float, default=420, help="no command starts after this")
    return parser


def main() -> int:
    """Make or run."""
    options = _parser().parse_args()
    if options.verb == "run":
        return run(options)
    make(options.folder, options.bundles)
    return 0


if __name__ == "__main__":
    sys.exit(main())
