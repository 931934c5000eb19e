"""Variants, and the processes that run them: one at a time works, the others wait for a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Child", "Variant", "stored_bytes"]

_CHILDREN = Path(__file__).parent / "children"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Variant:
    """One way to run the model."""

    name: str
    file: str  # of `children`
    path: Path  # a folder, or llama.cpp's one file
    tries: tuple[str, ...] = ("",)  # arguments behind the threads, of which the fastest is taken
    python: str = sys.executable


_MODEL_FILES = {".onnx", ".data", ".safetensors", ".bin", ".onnx_data", ".npy"}


def stored_bytes(path: Path) -> int:
    """Of a file, or of everything in a folder but tokenizers and texts about it."""
    if path.is_file():
        return path.stat().st_size
    kept = (file for file in path.rglob("*") if file.suffix in _MODEL_FILES)
    return sum(file.stat().st_size for file in kept)


class Child:
    """A process that has loaded a variant.

    Args:
        variant: What to load.
        threads: How many it computes with.
        tried: One of the variant's `tries`.
    """

    def __init__(self, variant: Variant, threads: int, tried: str) -> None:
        self.variant, self.threads, self.tried = variant, threads, tried
        command = [variant.python, str(_CHILDREN / variant.file), str(variant.path)]
        self._process = subprocess.Popen(
            [*command, str(threads), *tried.split()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # A peer's interpreter finds its own packages, headport's the repository it is in.
            env=_environment(threads, own=variant.python == sys.executable),
        )
        self.load_s: float = self._read()["load_s"]

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Its answer to one request.

        Raises:
            SystemExit: If it died.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.variant.name}: its process ended with exit code {self._process.wait()}; "
                f"run {self.variant.file} by itself to see why"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _environment(threads: int, *, own: bool) -> dict[str, str]:
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    if own:
        found["PYTHONPATH"] = os.pathsep.join((str(_ROOT / "src"), str(_ROOT)))
    else:
        found.pop("PYTHONPATH", None)
    return found
