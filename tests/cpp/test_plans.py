"""Bundles of TensorRT plans in C++ on a machine without a GPU: what is refused, and how.

Where NvInferRuntime.h is found, as in the folder `TENSORRT_INCLUDE_DIR` of the environment, the
library is built to run plans, else to refuse them. No plan is run here: `plan_test.cc` runs a
stand-in.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headport.gpu_probe import probe_gpu
from headport.runtime.engine.backends import load_backend
from headport.runtime.engine.builder import build_plan
from headport.runtime.engine.command import Options, engine
from tests.cpp.conftest import failed
from tests.runtime.engine.standing_in import standing_in

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def plans(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Backend → a bundle with plans, made by a stand-in."""
    folder, found = tmp_path_factory.mktemp("plans"), {}
    with standing_in() as library, pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt", library)
        patch.setattr(
            "headport.runtime.engine.plan.build_apart",
            lambda request, *_, **__: build_plan(load_backend(request.backend), request),
        )
        for backend in ("tensorrt", "tensorrt-rtx"):
            options = Options(bundle=tiny_bundle, output=folder / backend, backend=backend)
            found[backend] = engine(options).path
    return found


@pytest.fixture
def refusal(build: Path, tmp_path: Path) -> Callable[[Path], str]:
    """What a run prints as it is refused; ONNX Runtime is not to be had."""
    return lambda bundle: failed(build, "", bundle, tmp_path)


@pytest.fixture
def has_headers(build: Path) -> bool:
    """Whether the library is built to run plans."""
    return "HEADPORT_RUNS_PLANS:INTERNAL=ON" in (build / "CMakeCache.txt").read_text()


def edited(bundle: Path, output: Path, file: str, edit: Edit) -> Path:
    """A copy of which one JSON file is another, as its manifest says."""
    shutil.copytree(bundle, output)
    document = json.loads((output / file).read_bytes())
    edit(document)
    data = json.dumps(document).encode()
    (output / file).write_bytes(data)
    manifest = json.loads((output / "manifest.json").read_bytes())
    manifest["files"][file] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (output / "manifest.json").write_text(json.dumps(manifest))
    return output


def test_without_headers_plans_are_refused_by_name(refusal, plans, has_headers):
    if has_headers:
        pytest.skip("the library is built with TensorRT's headers")
    for backend, bundle in plans.items():
        said = refusal(bundle)
        assert "unsupported: this build of the library runs no TensorRT plans" in said
        name = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}[backend]
        assert f"-DTENSORRT_INCLUDE_DIR=FOLDER of {name}," in said


def test_with_headers_a_machine_without_a_gpu_is_refused(refusal, plans, has_headers):
    if not has_headers:
        pytest.skip("no headers of TensorRT here; name their folder as TENSORRT_INCLUDE_DIR")
    if probe_gpu():
        pytest.skip("there is a GPU")
    said = sorted(refusal(bundle) for bundle in plans.values())
    assert "no GPU: TensorRT plans run on a GPU; the NVIDIA driver, libcuda.so.1, was" in said[0]
    assert "headport lower --target ort-cpu" in said[0]
    # The headers are those of one of the two.
    assert "unsupported: a plan of tensorrt" in said[1]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("plan_sha256", "0" * 64, "is another plan (sha256 0000000000000000… expected"),
        ("graph_sha256", "0" * 64, "was made from another graph than backbone.onnx"),
        ("bundle_sha256", "0" * 64, "was made from another bundle"),
        ("plan", "engines/none.plan", "engines/none.plan is missing"),
        ("schema_version", 2, "build record version 1 was expected, 2 was found"),
        ("graph", "head.lm", "a second one of head.lm"),
        ("graph", "merged", "its plan is merged"),
        ("graph", "other", "a plan of backbone was expected, none is there"),
        ("backend", "tensorrt", "plans of tensorrt and tensorrt-rtx do not run together"),
        ("flags", 3, "not a build record that is known here"),
    ],
)
def test_plans_that_are_not_the_bundles_own(refusal, plans, tmp_path, field, value, words):
    source = plans["tensorrt-rtx"]
    bundle = edited(
        source,
        tmp_path / "edited",
        "engines/backbone.json",
        lambda record: record.update({field: value}),
    )
    said = refusal(bundle)
    assert words in said
    if "sha256" in field or field in ("plan", "schema_version"):
        assert "build it again: headport engine" in said


def test_a_lowered_bundle_without_plans(refusal, plans, tmp_path):
    bundle = tmp_path / "bare"
    shutil.copytree(plans["tensorrt"], bundle)
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    for name in [name for name in manifest["files"] if name.startswith("engines/")]:
        del manifest["files"][name]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    said = refusal(bundle)
    assert "bundle error" in said
    assert "a plan of backbone was expected, none is there; build it with `headport engine`" in said
