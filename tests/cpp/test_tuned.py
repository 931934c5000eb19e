"""Recorded threads in C++: on this kind of machine, unless the caller names a number."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headport.bundle import MANIFEST, Bundle, copy_files
from headport.machine import cpu_features, cpu_model, usable_cpus
from headport.manifest import Tuning, encode_manifest
from tests.cpp.conftest import SANITIZER_OPTIONS, failed

HERE, NOT_TUNED, ELSEWHERE = 1, 0, -1


@pytest.fixture
def tuned(tiny_lowered: Path, tmp_path: Path) -> Callable[..., Path]:
    """The bundle with records."""

    def write(*changes: dict[str, Any]) -> Path:
        record = Tuning(
            cpu=cpu_model(),
            cpus=usable_cpus(),
            instructions=cpu_features(),
            onnxruntime="1.32.0",
            threads=1,
            spinning=False,
        )
        source = Bundle.open(tiny_lowered)
        records = tuple(msgspec.structs.replace(record, **change) for change in changes)
        folder = tmp_path / "tuned"
        copy_files(source.path, source.manifest.files, folder)
        manifest = msgspec.structs.replace(source.manifest, tuned=records)
        (folder / MANIFEST).write_bytes(encode_manifest(manifest))
        return folder

    return write


@pytest.fixture
def opened(build: Path, onnxruntime: Path, tmp_path: Path) -> Callable[..., tuple[Any, ...]]:
    """Threads, spinning and whether recorded, of a bundle opened with a number of threads."""

    def run(bundle: Path, threads: int) -> tuple[Any, ...]:
        (tmp_path / "requests.json").write_text("[]")
        subprocess.run(
            [build / "tests" / "run_requests", bundle, *map(tmp_path.joinpath, _FILES)],
            env=SANITIZER_OPTIONS
            | {"HEADPORT_ORT": str(onnxruntime), "HEADPORT_THREADS": str(threads)},
            check=True,
        )
        found = json.loads((tmp_path / "replies.json").read_text())
        return found["threads"], found["spinning"], found["tuned"]

    return run


_FILES = ("requests.json", "replies.json")


def test_the_record_of_this_machine_is_used(opened: Any, tuned: Any, tiny_lowered: Path) -> None:
    cpus = usable_cpus()
    another = {"cpu": "Another"}
    assert opened(tuned(another, {}), 0) == (1, False, HERE)
    assert opened(tuned({"threads": cpus}), 0) == (cpus, False, HERE)
    assert opened(tuned(another), 0) == (cpus, cpus > 1, ELSEWHERE)
    assert opened(tuned({"cpus": cpus + 1}), 0) == (cpus, cpus > 1, ELSEWHERE)
    assert opened(tuned({}), 3) == (3, True, NOT_TUNED)
    assert opened(tiny_lowered, 0) == (cpus, cpus > 1, NOT_TUNED)


def test_a_wrong_record_is_refused(
    build: Path, onnxruntime: Path, tuned: Any, tmp_path: Path
) -> None:
    bundle = tuned({})
    file = bundle / MANIFEST
    file.write_text(file.read_text().replace('"threads": 1', '"threads": -1'))
    assert "-1 threads" in failed(build, onnxruntime, bundle, tmp_path)
