"""Corpora of three domains, as JSON lines: Python code, medical terms, Chinese.

Code is the interpreter's standard library; medical terms are ICD-10-CM (PyPI `simple-icd-10-cm`, US
government work); Chinese is what Debian's `fortunes-zh` holds (classical poems and prose, GPL-3+).
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from headport.errors import CheckpointError

__all__ = ["CHINESE", "DOMAINS", "write_corpus"]

CHINESE = Path("/usr/share/games/fortunes")
_CODE_CHARACTERS = 6_000_000
_DOCUMENT_CHARACTERS = 2000  # short entries are joined
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _code(chinese: Path) -> Iterator[str]:
    del chinese
    left = _CODE_CHARACTERS
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if left > 0 and "site-packages" not in file.parts:
            text = file.read_text(encoding="utf-8", errors="replace")
            left -= len(text)
            yield text


def _medical(chinese: Path) -> Iterator[str]:
    del chinese
    spec = importlib.util.find_spec("simple_icd_10_cm")
    if spec is None or spec.origin is None:
        raise CheckpointError("the medical text needs headport[demo] (simple-icd-10-cm)")
    file = next((Path(spec.origin).parent / "data").glob("*.xml"))
    for section in ElementTree.parse(file).getroot().iter("section"):
        terms = [node.text or "" for node in section.iter() if node.tag in ("desc", "note")]
        yield "; ".join(terms) + "."


def _chinese(chinese: Path) -> Iterator[str]:
    files = [f for f in sorted(chinese.glob("*")) if f.suffix == "" and f.is_file()]
    if not files:
        raise CheckpointError(
            f"Chinese text was expected in {chinese}; `apt-get install fortunes-zh`, or pass "
            "--chinese FOLDER"
        )
    for file in files:
        held = ""
        for entry in _COLOUR.sub("", file.read_text(encoding="utf-8")).split("\n%\n"):
            held += entry + "\n\n"
            if len(held) >= _DOCUMENT_CHARACTERS:
                yield held
                held = ""
        if held:
            yield held


DOMAINS: dict[str, Callable[[Path], Iterator[str]]] = {
    "code": _code,
    "medical": _medical,
    "chinese": _chinese,
}


def write_corpus(domain: str, file: Path, chinese: Path = CHINESE) -> Path:
    """Write a domain's documents as JSON lines."""
    with file.open("wb") as stream:
        for text in DOMAINS[domain](chinese):
            stream.write(msgspec.json.encode({"text": text}) + b"\n")
    return file
