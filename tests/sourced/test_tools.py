"""The other verbs on encoder-decoder bundles: what works, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.selftest import run_selftest
from tests.sourced.models import BINS, FRAMES, sources


def told(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    code = main([str(each) for each in arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_inspect_names_all_three_and_its_selftest_passes(name, bundle, capsys):
    code, text = told(capsys, "inspect", bundle(name), "--selftest")
    assert code == 0
    assert "encoder" in text and "cross keys and values are read by the backbone" in text
    for graph in ("graph encoder", "graph backbone", "graph head.lm"):
        assert graph in text
    assert "self-test" in text and "passed" in text


def test_the_selftest_notices_another_encoder(bundle, tmp_path):
    import shutil

    import msgspec

    folder = shutil.copytree(bundle("t5"), tmp_path / "bundle")
    opened = Bundle.open(folder)
    [weight] = [
        t
        for t in opened.manifest.tensors
        if t.consumers and all(c.startswith("encoder:") for c in t.consumers)
    ][:1]
    with (folder / weight.file).open("r+b") as stream:
        stream.seek(weight.offset)
        stream.write(np.full(weight.length // 4, 0.5, np.float32).tobytes())
    changed = Bundle(folder, msgspec.structs.replace(opened.manifest))
    assert run_selftest(Bundle.open(bundle("t5")))
    assert not run_selftest(changed)


@pytest.mark.parametrize("head", ["int8", "int4"])
def test_the_head_is_quantised(head, bundle, tmp_path, capsys):
    code, text = told(
        capsys, "quantize", bundle("bart"), "-o", tmp_path / "q", "--head", head, "--block", 32
    )
    assert code == 0, text
    manifest = Bundle.open(tmp_path / "q").manifest
    assert manifest.heads["lm"].quantization.format == head and manifest.source is not None
    code, text = told(capsys, "generate", tmp_path / "q", "--source", "The head", "--json", "-")
    assert code == 0, text


def test_a_certified_head_chooses_as_the_whole_one(bundle, tmp_path, capsys):
    from headport.runtime import Generator

    code, text = told(
        capsys,
        *("quantize", bundle("bart"), "-o", tmp_path / "q"),
        *("--head", "int8", "--rescore", 16, "--certify"),
    )
    assert code == 0, text
    given = sources("bart", 8)
    wanted = Generator(bundle("bart"), threads=1).generate(given, max_new_tokens=6)
    made = Generator(tmp_path / "q", threads=1)
    assert [r.token_ids for r in made.generate(given, max_new_tokens=6)] == [
        r.token_ids for r in wanted
    ]
    assert made.stats.certified > 0


def test_lowering_says_what_it_did(bundle, tmp_path, capsys):
    code, text = told(capsys, "lower", bundle("t5"), "-o", tmp_path / "l", "--target", "ort-cpu")
    assert code == 0 and "CachedAttention_relative" in text and "GroupQueryAttention" in text
    manifest = Bundle.open(tmp_path / "l").manifest
    names = {port.name for port in manifest.backbone.inputs}
    assert {"seqlens_k", "source_mask", "cross_key_values.0.key"} <= names
    assert run_selftest(Bundle.open(tmp_path / "l"))


@pytest.mark.parametrize(
    ("verb", "options", "advice"),
    [
        ("lower", ("--target", "ort-cuda"), "lower it to ort-cpu"),
        ("lower", ("--target", "tensorrt"), "lower it to ort-cpu"),
        ("quantize", ("--backbone", "int8"), "quantise its head with --head alone"),
        ("quantize", ("--head", "int8", "--calibration", "TEXT"), "leave it out"),
        ("merge", (), "use its graphs as they are"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else x,
)
def test_what_is_not_supported_is_refused(verb, options, advice, bundle, tmp_path, capsys):
    text_file = tmp_path / "text.txt"
    text_file.write_text("The head is the last matrix of a language model. " * 20)
    given = [str(text_file) if each == "TEXT" else each for each in options]
    code, text = told(capsys, verb, bundle("t5"), "-o", tmp_path / "out", *given)
    assert code == 2, text
    assert "encoder-decoder" in text and advice in text
    assert not (tmp_path / "out").exists()


def test_generate_answers_a_source(bundle, capsys):
    code, text = told(
        capsys, "generate", bundle("marian"), "--source", "The head", "--max-new-tokens", 4
    )
    assert code == 0 and "[4 tokens" in text


def test_generate_reads_features_from_a_file(bundle, tmp_path, capsys):
    np.save(tmp_path / "features.npy", sources("whisper", 1)[0])
    code, text = told(
        capsys,
        *("generate", bundle("whisper"), "--features", tmp_path / "features.npy"),
        *("-p", "The", "--max-new-tokens", 3, "--json", tmp_path / "reply.json"),
    )
    assert code == 0, text
    reply = json.loads((tmp_path / "reply.json").read_text())
    assert len(reply["token_ids"]) == 3 and len(reply["prompt_token_ids"]) > 1
    assert reply["stats"]["encoder_runs"] == 1


WRONG: list[tuple[str, tuple[str, ...], str]] = [
    ("t5", ("-p", "The head"), "--source was expected, none was given"),
    ("t5", ("--features", "FILE"), "--source was expected, --features was given"),
    ("whisper", ("--source", "The head"), "--features was expected, --source was given"),
    ("whisper", ("--features", "nothing.npy"), "no array in NumPy's format"),
    ("t5", ("--source", "The head", "--chat"), "--chat is for decoder-only models"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG, ids=[m for *_, m in WRONG])
def test_wrong_use_of_generate_is_named(name, options, message, bundle, tmp_path, capsys):
    np.save(tmp_path / "f.npy", np.zeros((BINS, FRAMES), np.float32))
    given = [str(tmp_path / "f.npy") if each == "FILE" else each for each in options]
    code, text = told(capsys, "generate", bundle(name), *given)
    assert code == 2 and message in text


def test_a_decoder_only_bundle_takes_no_source(tiny_bundle, capsys):
    code, text = told(capsys, "generate", tiny_bundle, "--source", "The head")
    assert code == 2 and "reads no source" in text
    code, text = told(capsys, "generate", tiny_bundle)
    assert code == 2 and "give a text with -p" in text


def test_memory_is_measured(bundle: Callable[[str], Path], capsys):
    code, text = told(capsys, "inspect", bundle("whisper"), "--memory")
    assert code == 0 and "resident after one token" in text
