"""Numbers and names that stand in Python and in C++ are the same; needs no compiler."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from headport import __version__, kernels
from headport.cache_ports import SPARE_SLOTS
from headport.manifest import MOST_CPUS, Manifest, Tuning
from headport.runtime import Generator
from headport.runtime.limits import MAX_BEAMS, MAX_LOGPROBS, MAX_REPLIES
from headport.runtime.prompts import DEFAULT_NEW_TOKENS
from headport.runtime.scheduling.capacity import MOST_SLOTS

CPP = Path(__file__).parents[2] / "runtime" / "cpp"
CHUNK = inspect.signature(Generator).parameters["prefill_chunk"].default


@pytest.mark.parametrize(
    ("file", "pattern", "expected"),
    [
        ("CMakeLists.txt", r"project\(headport VERSION (\S+)", __version__),
        ("src/bundle/manifest.cc", r"kMostCpus = (\d+);", str(MOST_CPUS)),
        ("src/opened.cc", r"kMostRows = (\d+);", str(MOST_SLOTS)),
        ("src/generator/generator.cc", r"kNewTokens = (\d+);", str(DEFAULT_NEW_TOKENS)),
        ("src/generator/limits.cc", r"kMostLogprobs = (\d+);", str(MAX_LOGPROBS)),
        ("src/generator/limits.cc", r"kMostReplies = (\d+);", str(MAX_REPLIES)),
        ("src/generator/limits.cc", r"kMostBeams = (\d+);", str(MAX_BEAMS)),
        ("src/generator/in_place_runner.cc", r"kSpareSlots = (\d+);", str(SPARE_SLOTS)),
        ("src/generator/in_place_runner.cc", r"kChunk = (\d+);", str(CHUNK)),
        ("src/ort/kernels.h", r"kKernelsOption = \"(\S+)\";", kernels.OPTION),
        ("src/ort/kernels.cc", r"kVersion = (\d+);", str(kernels.VERSION)),
        (
            "../kernels/src/library.cc",
            r"headport_kernels_version\(\) \{ return (\d+); \}",
            str(kernels.VERSION),
        ),
    ],
)
def test_a_number_is_the_same_on_both_sides(file: str, pattern: str, expected: str) -> None:
    assert re.findall(pattern, (CPP / file).read_text(encoding="utf-8")) == [expected]


def test_every_field_of_a_manifest_is_known_to_both() -> None:
    table = (CPP / "src/bundle/schema.cc").read_text(encoding="utf-8")
    known = re.findall(r'\{"(\w+)", Kind::', table.partition("const Record kManifest")[2])
    assert sorted(known) == sorted(Manifest.__struct_fields__)
    record = table.partition("const Record kTuning")[2].partition("const Record")[0]
    assert re.findall(r'\{"(\w+)", Kind::', record) == list(Tuning.__struct_fields__)
