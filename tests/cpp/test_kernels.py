"""Bundles lowered with --kernels: C++ gives the tokens of Python, or says what is missing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from headport.export.command import Options as ExportOptions
from headport.export.command import export
from headport.kernels import VERSION
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize import Options as QuantizeOptions
from headport.quantize import quantize
from headport.runtime import Generator
from tests.conftest import llama_config, save_model
from tests.cpp.conftest import SANITIZER_OPTIONS, failed
from tests.kernels.conftest import BUILD, built

PROMPTS = [[5, 9, 2], [17], [n % 97 + 3 for n in range(100)]]
OPTIONS = [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.2, "top_k": 12, "seed": 4}]


@pytest.fixture(scope="module")
def library(build: Path) -> Path:  # what that needs, this needs
    return built(BUILD) / "libheadport_kernels.so"


@pytest.fixture(scope="module")
def bundle(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    model = save_model(folder / "model", llama_config(max_position_embeddings=160))
    fp32 = export(ExportOptions(model=str(model), output=folder / "fp32")).path
    options = QuantizeOptions(bundle=fp32, output=folder / "q", backbone="int8", head="int8")
    return lower(
        LowerOptions(
            bundle=quantize(options).path,
            output=folder / "cpu",
            target="ort-cpu",
            kernels=library,
        )
    ).path


def test_the_same_tokens(
    build: Path,
    onnxruntime: Path,
    library: Path,
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests, replies = tmp_path / "requests.json", tmp_path / "replies.json"
    asked = [{"prompts": PROMPTS, "options": {"max_new_tokens": 16} | each} for each in OPTIONS]
    requests.write_text(json.dumps(asked))
    named = {"HEADPORT_ORT": str(onnxruntime), "HEADPORT_KERNELS": str(library)}
    done = subprocess.run(
        [build / "tests" / "run_requests", bundle, requests, replies, "2"],
        env=SANITIZER_OPTIONS | named,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [
        [reply["token_ids"] for reply in each["replies"]]
        for each in json.loads(replies.read_text())["requests"]
    ]
    monkeypatch.setenv("HEADPORT_KERNELS", str(library))
    with Generator(bundle, threads=1) as generator:
        expected = [
            [r.token_ids for r in generator.generate(PROMPTS, max_new_tokens=16, **each)]
            for each in OPTIONS
        ]
    assert found == expected


def test_what_is_missing(
    build: Path, onnxruntime: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "was lowered with --kernels and needs that library" in failed(
        build, onnxruntime, bundle, tmp_path
    )
    monkeypatch.setitem(SANITIZER_OPTIONS, "HEADPORT_KERNELS", str(bundle / "manifest.json"))
    assert "not a library of headport's kernels" in failed(build, onnxruntime, bundle, tmp_path)
    monkeypatch.setitem(SANITIZER_OPTIONS, "HEADPORT_KERNELS", str(onnxruntime))
    assert "not a library of headport's kernels" in failed(build, onnxruntime, bundle, tmp_path)
    other, source = tmp_path / "other.so", tmp_path / "other.cc"
    source.write_text('extern "C" int headport_kernels_version() { return 2; }\n')
    subprocess.run(["c++", "-shared", "-fPIC", source, "-o", other], check=True)
    monkeypatch.setitem(SANITIZER_OPTIONS, "HEADPORT_KERNELS", str(other))
    assert f"of version {VERSION} were expected, 2 were found" in failed(
        build, onnxruntime, bundle, tmp_path
    )
