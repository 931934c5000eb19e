"""Ids of the C++ library's encoder against Python's, line by line of real texts.

`python -m benchmarks.cpp_texts PROGRAM TOKENIZER.json FILE …` encodes every line of the files,
packed ones (`.gz`) too, with both: PROGRAM is `tests/text_requests` of a build of `runtime/cpp`,
`$HEADPORT_ORT` is ONNX Runtime's and `$HEADPORT_TOKENIZER` GenAI's shared library. Ids are decoded
again as well. Times are not measured. Lines that differ are listed; the exit code is 1 if there is
one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

__all__ = ["main"]

_LINES_AT_ONCE = 20_000
_SHOWN = 5


def main() -> int:
    """Compare all lines of all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    inner = Tokenizer.from_file(str(options.tokenizer))
    inner.no_truncation()
    inner.no_padding()
    lines = tokens = 0
    wrong: list[str] = []
    for part in _parts(_lines(options.files)):
        expected = [each.ids for each in inner.encode_batch(part)]
        found = _ask(options, {"encode": part, "decode": expected, "stream": []})
        texts = inner.decode_batch(expected, skip_special_tokens=True)
        lines += len(part)
        tokens += sum(map(len, expected))
        rows = zip(part, expected, found["encode"], texts, found["decode"], strict=True)
        wrong += [line for line, a, b, text, other in rows if a != b or text != other]
    for line in wrong[:_SHOWN]:
        print(repr(line)[:200])
    print(f"{len(options.files)} files, {lines} lines, {tokens} tokens: {len(wrong)} lines differ")
    return 1 if wrong or not lines else 0


def _lines(files: list[Path]) -> Iterator[str]:
    for file in files:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        text = data.decode("utf-8", errors="replace").replace("\0", "")
        yield from text.splitlines(keepends=True)


def _parts(lines: Iterator[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for line in lines:
        part.append(line)
        if len(part) == _LINES_AT_ONCE:
            yield part
            part = []
    if part:
        yield part


def _ask(options: argparse.Namespace, requests: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "requests.json", Path(folder) / "replies.json"
        asked.write_text(json.dumps(requests))
        subprocess.run([options.program, options.tokenizer, asked, answered], check=True)
        found: dict[str, Any] = json.loads(answered.read_text())
        return found


if __name__ == "__main__":
    sys.exit(main())
