"""One binary on several releases of ONNX Runtime, and what it says where one is too old."""

from __future__ import annotations

from pathlib import Path

import pytest

from headport.export.command import Options as ExportOptions
from headport.export.command import export
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize import Options as QuantizeOptions
from headport.quantize import quantize
from tests.conftest import llama_config, save_model
from tests.cpp.conftest import ROOT, failed
from tests.cpp.test_same_tokens import LONG, PROMPTS, REQUESTS, cpp_replies, python_replies

RELEASES = ROOT / "build" / "ort-releases"  # as runtime/cpp/fetch_releases.sh writes it


def library(release: str) -> Path:
    found = list((RELEASES / release).glob("lib/*/site-packages/onnxruntime/capi/libonnx*.so.*"))
    if not found:
        pytest.skip(f"ONNX Runtime {release} is not there; `sh runtime/cpp/fetch_releases.sh`")
    return found[0]


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An INT8 head and a float backbone, lowered for ONNX Runtime 1.30."""
    folder = tmp_path_factory.mktemp("releases")
    model = save_model(folder / "model", llama_config(max_position_embeddings=160))
    fp32 = export(ExportOptions(model=str(model), output=folder / "fp32")).path
    int8 = quantize(QuantizeOptions(bundle=fp32, output=folder / "int8", head="int8")).path
    options = LowerOptions(
        bundle=int8, output=folder / "cpu", target="ort-cpu", onnxruntime_at_least="1.30"
    )
    return lower(options).path


@pytest.mark.parametrize("release", ["1.30.0", "1.31.1", "1.32.0"])
def test_one_binary_gives_the_same_tokens_on_every_release(
    build: Path, older: Path, tmp_path: Path, release: str
) -> None:
    prompts = [*PROMPTS, LONG]
    found = cpp_replies(build, library(release), older, prompts, tmp_path, 4)
    assert found["onnxruntime"] == release
    expected = python_replies(older, prompts)
    for name, wanted, given in zip(REQUESTS, expected, found["requests"], strict=True):
        replies = [reply["token_ids"] for reply in given["replies"]]
        assert replies == [reply.token_ids for reply in wanted], name


def test_rows_lowered_for_an_older_release_run_as_those_for_the_newest(
    build: Path, onnxruntime: Path, older: Path, tmp_path: Path
) -> None:
    """Needs no release beside the installed one."""
    prompts = [*PROMPTS, LONG]
    expected = python_replies(older, prompts)
    for rows in (1, 4):
        found = cpp_replies(build, onnxruntime, older, prompts, tmp_path, rows)
        for name, wanted, given in zip(REQUESTS, expected, found["requests"], strict=True):
            replies = [reply["token_ids"] for reply in given["replies"]]
            assert replies == [reply.token_ids for reply in wanted], name


def test_a_release_that_is_too_old_is_named_with_the_way_out(
    build: Path, tiny_lowered: Path, tmp_path: Path
) -> None:
    message = failed(build, library("1.31.1"), tiny_lowered, tmp_path)
    assert "lowered for ONNX Runtime 1.32 or newer, release 1.31.1 was loaded" in message
    assert "headport lower --onnxruntime-at-least 1.30" in message
