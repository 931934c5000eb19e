"""Heads that give candidates, heads chosen by name, and beams: C++ against Python."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.export.command import Options as ExportOptions
from headport.export.command import export
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize import Options as QuantizeOptions
from headport.quantize import quantize
from headport.quantize.prune import Options as PruneOptions
from headport.quantize.prune import prune
from headport.runtime import Generator
from tests.cpp.conftest import SANITIZER_OPTIONS, failed
from tests.quantize.prune.tokenizers_of import byte_level
from tests.quantize.prune.toys import count_texts, write_bundle

PROMPTS = [[5, 9, 2], [17], [40, 41, 42, 43]]

# What candidates decide, and what they never do.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "cold": {"temperature": 0.8, "seed": 3},
    "hot": {"temperature": 1.5, "seed": 4},
    "min-p": {"temperature": 1.0, "min_p": 0.3, "seed": 5},
    "top-k": {"temperature": 1.0, "top_k": 12, "seed": 6},
    "top-k, top-p": {"temperature": 1.0, "top_k": 12, "top_p": 0.8, "seed": 7},
    "top-p": {"temperature": 1.0, "top_p": 0.2, "seed": 8},
    "typical-p": {"temperature": 1.0, "typical_p": 0.6, "seed": 9},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "temperature": 1.0,
        "seed": 1,
    },
    "rewards": {"repetition_penalty": 0.9, "logit_bias": [[[7], 1.5], [[60], -2.0]]},
    "bans": {"no_repeat_ngram_size": 1, "bad_words": [[12], [40, 41]], "top_k": 9}
    | {"temperature": 1.2, "seed": 2},
    "few allowed": {"allowed": [100, 101, 102]},
    "samples": {"temperature": 1.0, "seed": 11, "n": 2},
    "likelihoods": {"temperature": 0.7, "top_k": 20, "seed": 12, "logprobs": 3},
}
BEAMS: dict[str, dict[str, Any]] = {
    "two": {"num_beams": 2},
    "all of four": {"num_beams": 4, "n": 4, "length_penalty": 0.0},
    "early": {"num_beams": 3, "n": 2, "early_stopping": True, "length_penalty": 2.0},
    "never early": {"num_beams": 3, "n": 3, "early_stopping": "never", "length_penalty": -1.0},
    "with rules": {"num_beams": 3, "n": 3, "no_repeat_ngram_size": 2, "suppress_tokens": [7, 8]},
    "with a stop text": {"num_beams": 3, "n": 3, "stop": ["e", "t"]},
}


@pytest.fixture(scope="module")
def bundles(
    tiny_llama: Path, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """ort-cpu bundles by what is particular about their heads."""
    folder = tmp_path_factory.mktemp("heads")

    def made(name: str, source: Path, **options: Any) -> Path:
        if options:
            asked = QuantizeOptions(bundle=source, output=folder / name, **options)
            source = quantize(asked).path
        asked = LowerOptions(bundle=source, output=folder / f"{name}-cpu", target="ort-cpu")
        return lower(asked).path

    half = export(ExportOptions(model=str(tiny_llama), output=folder / "half", dtype="fp16")).path
    toy = write_bundle(folder / "toy", byte_level())
    counts = count_texts(folder / "counts.parquet", toy)
    asked = {"counts": counts, "least": 1, "mode": "output"}
    pruned = prune(PruneOptions(bundle=toy.path, output=folder / "pruned", **asked)).path
    int8: dict[str, Any] = {"head": "int8", "block": 16}
    return {
        "fp32": made("fp32", tiny_bundle),
        "certified": made("certified", tiny_bundle, **int8, certify=True),
        "certified by row": made("row", tiny_bundle, **int8, certify=True, bound="row"),
        "half": made("half-certified", half, **int8, certify=True),
        "rescored": made("rescored", tiny_bundle, head="int4", block=16, rescore=32),
        "pruned": made("pruned-certified", pruned, **int8, certify=True, rescore=16),
    }


def cpp(
    build: Path,
    onnxruntime: Path,
    bundle: Path,
    requests: list[dict[str, Any]],
    folder: Path,
    **environment: str,
) -> dict[str, Any]:
    (folder / "requests.json").write_text(json.dumps(requests))
    done = subprocess.run(
        [build / "tests" / "run_requests", bundle, "requests.json", "replies.json", "2"],
        cwd=folder,
        env={"HEADPORT_ORT": str(onnxruntime), **SANITIZER_OPTIONS, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 1:
        return {"refused": done.stderr}
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "replies.json").read_text())
    return found


def asked(requests: dict[str, dict[str, Any]], limit: int = 16) -> list[dict[str, Any]]:
    each = {"max_new_tokens": limit}
    return [{"prompts": PROMPTS, "options": each | options} for options in requests.values()]


@pytest.mark.parametrize("kind", ["certified", "certified by row", "half", "rescored", "pruned"])
def test_candidates_give_the_tokens_that_python_gets_from_them(
    build: Path, onnxruntime: Path, bundles: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    found = cpp(build, onnxruntime, bundles[kind], asked(REQUESTS), tmp_path)
    with Generator(bundles[kind], threads=1) as generator:
        assert found["exact"] == generator.exact == (kind != "rescored")
        for (name, options), given in zip(REQUESTS.items(), found["requests"], strict=True):
            wanted = generator.generate(PROMPTS, max_new_tokens=16, **options)
            ids = [reply["token_ids"] for reply in given["replies"]]
            assert ids == [reply.token_ids for reply in wanted], name
            for reply, expected in zip(given["replies"], wanted, strict=True):
                logprobs = [each[0] for each in reply.get("logprobs", [])]
                assert logprobs == pytest.approx([e.logprob for e in expected.logprobs], abs=1e-4)
        stats = generator.stats
    counts = found["stats"]
    assert counts["new_tokens"] == stats.new_tokens
    sums = {"certified": stats.certified, "fallbacks": stats.fallbacks, "unproved": stats.unproved}
    assert sum(sums.values()) == stats.new_tokens
    assert set(counts["modes"]) == set(stats.modes)
    for name, total in sums.items():  # near ties of bounds may fall on either side
        assert counts[name] == pytest.approx(total, abs=3), name
    if kind == "rescored":
        assert counts["unproved"] == stats.new_tokens
    else:
        assert counts["certified"] > stats.new_tokens / 2 and counts["unproved"] == 0


def test_exact_tokens_are_those_of_the_float32_head(
    build: Path, onnxruntime: Path, bundles: dict[str, Path], tmp_path: Path
) -> None:
    exact = cpp(build, onnxruntime, bundles["certified"], asked(REQUESTS), tmp_path)
    full = cpp(build, onnxruntime, bundles["fp32"], asked(REQUESTS), tmp_path)
    ids = [[r["token_ids"] for r in each["replies"]] for each in exact["requests"]]
    assert ids == [[r["token_ids"] for r in each["replies"]] for each in full["requests"]]
    assert exact["stats"]["fallbacks"] > 0  # typical-p, at least
    assert not full["exact"] and full["stats"]["modes"] == {}


def test_exact_can_be_left_out_or_asked_for(
    build: Path, onnxruntime: Path, bundles: dict[str, Path], tmp_path: Path
) -> None:
    given = (build, onnxruntime, bundles["certified"], asked(REQUESTS), tmp_path)
    found = cpp(*given, HEADPORT_EXACT="0")
    assert not found["exact"]
    assert found["stats"]["fallbacks"] == 0 and found["stats"]["unproved"] > 0
    for kind, words in (("fp32", "all logits"), ("rescored", "candidates without a certificate")):
        wrong = cpp(build, onnxruntime, bundles[kind], [], tmp_path, HEADPORT_EXACT="1")
        assert "exact answers need a certified head" in wrong["refused"]
        assert words in wrong["refused"]


def test_a_certificate_that_does_not_hold_is_refused(
    build: Path, onnxruntime: Path, bundles: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(bundles["certified"], folder)
    manifest = Bundle.open(folder).manifest
    entry = next(t for t in manifest.tensors if t.name == "certificate.bounds")
    array = np.memmap(folder / entry.file, np.float32, "r+", entry.offset, entry.shape)
    array /= 2
    array.flush()
    wrong = cpp(build, onnxruntime, folder, [], tmp_path)
    assert "its sha256 is not the manifest's" in wrong["refused"]
    given = (build, onnxruntime, folder, [], tmp_path)
    assert "certificate BROKEN" in cpp(*given, HEADPORT_VERIFY="0")["refused"]
    assert cpp(*given, HEADPORT_VERIFY="0", HEADPORT_EXACT="0")["stats"]["new_tokens"] == 0


@pytest.mark.parametrize("kind", ["fp32", "certified", "rescored", "pruned"])
def test_beams_are_those_of_python(
    build: Path, onnxruntime: Path, bundles: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    found = cpp(build, onnxruntime, bundles[kind], asked(BEAMS, 8), tmp_path)
    ends = set()
    with Generator(bundles[kind], threads=1) as generator:
        for (name, options), given in zip(BEAMS.items(), found["requests"], strict=True):
            wanted = generator.generate(PROMPTS, max_new_tokens=8, **options)
            replies = given["replies"]
            assert [r["token_ids"] for r in replies] == [w.token_ids for w in wanted], name
            assert [r["finish_reason"] for r in replies] == [w.finish_reason for w in wanted], name
            assert [r["sample"] for r in replies] == [w.sample for w in wanted]
            scores = [w.score for w in wanted]
            assert [r["score"] for r in replies] == pytest.approx(scores, rel=1e-4), name
            if "stop" in options:
                assert [r["text"] for r in replies] == [w.text for w in wanted]
            ends |= {w.finish_reason for w in wanted}
    assert len(ends) > 1 or kind == "pruned", "no beam ended before its limit"


@pytest.mark.parametrize(
    "wrong",
    [
        ({"num_beams": 2, "temperature": 1.0}, "beam search is greedy: num_beams=2"),
        ({"num_beams": 2, "n": 3}, "n must be from 1 to num_beams=2, 3 was given"),
        ({"length_penalty": 2.0}, "would have no effect without num_beams above 1"),
        ({"num_beams": 2, "logprobs": 1}, "logprobs are not given for beams"),
        ({"num_beams": 1001}, "num_beams must be a whole number from 1"),
        (
            {"num_beams": 2, "length_penalty": 51.0},
            "length_penalty must be a number from -50 to 50",
        ),
        ({"n": 10001, "temperature": 1.0}, "n must be a whole number from 1 to 10000"),
        ({"stop": [""]}, "stop must be texts of UTF-8 that are not empty"),
        ({"num_beams": 2, "suppress_tokens": list(range(257))}, "ban every token after every beam"),
    ],
)
def test_wrong_options_of_beams_are_refused(
    build: Path, onnxruntime: Path, tiny_lowered: Path, tmp_path: Path, wrong: tuple[Any, str]
) -> None:
    options, words = wrong
    assert words in failed(build, onnxruntime, tiny_lowered, tmp_path, options)


STOPS: dict[str, dict[str, Any]] = {
    "greedy": {"stop": ["e"]},
    "drawn": {"temperature": 1.3, "seed": 5, "stop": [" a", "qu", "ze"]},
    "several bytes": {"temperature": 2.0, "seed": 6, "stop": ["é", "\ufffd"]},
    "none": {"temperature": 2.0, "seed": 7, "texts": 1},
}


def test_stop_texts_and_streams_are_those_of_python(
    build: Path, onnxruntime: Path, bundles: dict[str, Path], tmp_path: Path
) -> None:
    found = cpp(build, onnxruntime, bundles["fp32"], asked(STOPS, 40), tmp_path)
    reasons = set()
    with Generator(bundles["fp32"], threads=1) as generator:
        for options, given in zip(STOPS.values(), found["requests"], strict=True):
            known = {k: v for k, v in options.items() if k != "texts"}
            for n, (prompt, reply) in enumerate(zip(PROMPTS, given["replies"], strict=True)):
                with generator.stream(prompt, max_new_tokens=40, **known) as stream:
                    parts = [token.text for token in stream]
                    wanted = stream.generation
                assert reply["token_ids"] == wanted.token_ids
                assert reply["finish_reason"] == wanted.finish_reason
                assert reply["text"] == wanted.text
                assert [t[4] for t in given["streamed"] if t[0] == n] == parts
                reasons.add(wanted.finish_reason)
    assert {"stop", "length"} <= reasons


def test_a_head_is_chosen_by_its_name(
    build: Path, onnxruntime: Path, bundles: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "two"
    shutil.copytree(bundles["fp32"], folder)
    two = json.loads((folder / "manifest.json").read_text())
    two["heads"]["other"] = two["heads"]["lm"]
    (folder / "manifest.json").write_text(json.dumps(two))
    given = (build, onnxruntime, folder, asked({"greedy": {}}), tmp_path)
    found = cpp(*given, HEADPORT_HEAD="other")
    assert found["heads"] == ["lm", "other"]
    assert found["requests"] == cpp(*given)["requests"]
    assert (
        "no head 'third' in it (heads: lm, other)" in cpp(*given, HEADPORT_HEAD="third")["refused"]
    )
