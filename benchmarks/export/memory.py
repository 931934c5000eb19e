"""Peak memory of an export whose checkpoint is larger than the limit.

    python -m benchmarks.export.memory [--layers 28] [--json FILE]

Writes a random Llama of 3.0 B parameters (or what `--layers` gives) shard by shard, exports it and
says what it cost: seconds, peak memory of the process tree, bytes read and written. Needs about
three times the checkpoint in disk space (default 25 GB); everything it wrote is deleted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.synthetic import write_checkpoint
from benchmarks.tree import run_measured

__all__ = ["ExportMemory", "main"]

_LIMIT_BYTES = 1_500_000_000  # above the largest tensor
_SIZES = {
    "vocab_size": 64_000,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class ExportMemory:
    """What one export cost."""

    parameters: int
    checkpoint_bytes: int
    largest_tensor_bytes: int  # as exported
    seconds: float
    peak_rss_bytes: int  # of the process tree
    limit_bytes: int

    def __bool__(self) -> bool:
        return 0 < self.peak_rss_bytes <= self.limit_bytes


def main(arguments: list[str] | None = None) -> int:
    """Write, export, print; exit 1 above the limit."""
    parser = argparse.ArgumentParser(description="Peak memory of an export.")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    found = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="export-memory-", dir=found.folder))
    try:
        (work / "checkpoint").mkdir()
        written = write_checkpoint(work / "checkpoint", num_hidden_layers=found.layers, **_SIZES)
        measured = run_measured("export", str(work / "checkpoint"), "-o", str(work / "bundle"))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(measured.output)
    if measured.exit_code:
        return measured.exit_code
    result = ExportMemory(
        parameters=written.parameters,
        checkpoint_bytes=written.bytes,
        largest_tensor_bytes=4 * written.largest,
        seconds=measured.seconds,
        peak_rss_bytes=measured.peak_rss_bytes,
        limit_bytes=_LIMIT_BYTES + 4 * written.largest,
    )
    print(
        f"{written.parameters / 1e9:.2f} B parameters, bfloat16 checkpoint "
        f"{written.bytes / 1e9:.1f} GB, "
        f"exported as fp32 in {measured.seconds:.0f} s\n"
        f"peak of the process tree {result.peak_rss_bytes / 1e9:.2f} GB, limit "
        f"{result.limit_bytes / 1e9:.2f} GB (1.5 GB + the largest tensor, "
        f"{result.largest_tensor_bytes / 1e9:.2f} GB): {'within' if result else 'ABOVE'}"
    )
    if found.json:
        found.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    return 0 if result else 1


if __name__ == "__main__":
    sys.exit(main())
