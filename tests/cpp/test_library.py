"""The C++ library as its users meet it: its own tests, installed, and with everything wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headport.bundle import MANIFEST, Bundle
from headport.manifest import Prefix, encode_manifest
from headport.runtime import Generator
from tests.cpp.conftest import SANITIZE, SANITIZER_OPTIONS, failed, run

CONSUMER = Path(__file__).parent / "consumer"
PROMPT = [5, 9, 2]


def test_its_own_tests_pass(build: Path) -> None:
    run("ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error")


def newest(name: str) -> str:
    """A compiler by its own name, or with the number that Debian gives it."""
    found = [name, *(f"{name}-{number}" for number in range(22, 11, -1))]
    present = next(filter(shutil.which, found), None)
    return present or pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize(("c", "cxx"), [("gcc", "g++"), ("clang", "clang++")])
def test_another_project_finds_and_uses_the_installed_package(
    installed: Path, onnxruntime: Path, tiny_lowered: Path, tmp_path: Path, c: str, cxx: str
) -> None:
    if SANITIZE and c == "clang":
        pytest.skip("two compilers' sanitizers do not go together")
    compilers = (f"-DCMAKE_C_COMPILER={newest(c)}", f"-DCMAKE_CXX_COMPILER={newest(cxx)}")
    run("cmake", "-S", CONSUMER, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={installed}", *compilers)
    run("cmake", "--build", tmp_path)
    with Generator(tiny_lowered, threads=1) as generator:
        [expected] = generator.generate([PROMPT], max_new_tokens=8)
    for program in ("consumer", "consumer_c"):
        done = call(tmp_path / program, tiny_lowered, HEADPORT_ORT=str(onnxruntime))
        assert done.returncode == 0, done.stderr
        assert [int(i) for i in done.stdout.split()] == expected.token_ids


def test_threads(build: Path, onnxruntime: Path, tiny_lowered: Path) -> None:
    done = call(build / "tests" / "threads_test", tiny_lowered, HEADPORT_ORT=str(onnxruntime))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="pkg-config is not installed")
@pytest.mark.skipif(bool(SANITIZE), reason="sanitizers ask for flags that pkg-config does not give")
def test_pkg_config_says_what_a_compiler_needs(installed: Path, tmp_path: Path) -> None:
    [folder] = installed.glob("lib*/**/pkgconfig")
    asked = ["pkg-config", "--cflags", "--libs", "headport"]
    flags = subprocess.run(
        asked,
        env=os.environ | {"PKG_CONFIG_PATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    run("cc", CONSUMER / "consumer_c.c", *flags, "-o", tmp_path / "program")


def call(program: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *map(str, arguments)],
        env=SANITIZER_OPTIONS | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def refusal(build: Path, onnxruntime: Path, tmp_path: Path) -> Any:
    """`refusal(bundle, options, ort=…)` → what a run prints as it is refused."""

    def refused(
        bundle: Path, options: dict[str, Any] | None = None, ort: Path | str = onnxruntime
    ) -> str:
        return failed(build, ort, bundle, tmp_path, options)

    return refused


def test_a_missing_or_foreign_onnxruntime_is_refused(refusal, tiny_lowered, build):
    assert "library error: ONNX Runtime's shared library was expected" in refusal(
        tiny_lowered, ort="/nowhere/libonnxruntime.so"
    )
    [own] = build.glob("libheadport.so.?")
    assert "does not export OrtGetApiBase" in refusal(tiny_lowered, ort=own)


def test_bundles_that_it_cannot_run_are_refused_by_name(
    refusal, tiny_bundle, tiny_lowered, tmp_path
):
    assert "unsupported" in refusal(tiny_bundle)
    assert "headport lower --target ort-cpu" in refusal(tiny_bundle)
    assert "bundle error" in refusal(tmp_path / "nothing")
    tuned = shutil.copytree(tiny_lowered, tmp_path / "tuned")
    manifest = msgspec.structs.replace(
        Bundle.open(tuned).manifest, prefix=Prefix(kind="PREFIX_TUNING", tokens=4)
    )
    (tuned / MANIFEST).write_bytes(encode_manifest(manifest))
    assert "unsupported" in refusal(tuned)
    assert "the bundle has a prefix, learnt keys and values" in refusal(tuned)


def test_a_damaged_bundle_is_refused(refusal, tiny_lowered, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_lowered, damaged)
    graph = damaged / "backbone.onnx"
    data = bytearray(graph.read_bytes())
    data[len(data) // 2] ^= 1
    graph.write_bytes(data)
    assert "bundle error" in refusal(damaged)
    assert "its sha256 is not the manifest's" in refusal(damaged)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature must be a number from 0 (greedy) to 1e30, -1 was"),
        ({"top_p": 1.5, "top_k": -1}, "top_k must be"),
        ({"top_k": 5}, "would have no effect, because temperature is 0"),
        ({"n": 2}, "greedy replies would all be equal"),
        ({"suppress_tokens": [257]}, "token ids from 0 to 256 were expected; found"),
        ({"max_new_tokens": 100}, "prompt error: prompt 0 has 3 tokens and 100 more"),
        ({"logprobs": 1001}, "logprobs must be a whole number from 0 to 1000"),
        ({"bad_words": [[]]}, "sequences that are not empty"),
    ],
)
def test_wrong_options_are_refused(refusal, tiny_lowered, options, words):
    assert words in refusal(tiny_lowered, options)
