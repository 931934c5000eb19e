"""The C++ library, in a process without Python, gives the tokens that the Python runtime gives."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

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
from tests.conftest import llama_config, save_model
from tests.cpp.conftest import SANITIZER_OPTIONS
from tests.quantize.prune.tokenizers_of import byte_level
from tests.quantize.prune.toys import count_texts, write_bundle

# Ragged; one longer than a chunk of a prompt, where the context holds it.
PROMPTS = [[5, 9, 2], [17], [40, 41, 42, 43], [1, 2], [7, 7, 7]]
LONG = [n % 97 + 3 for n in range(100)]

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.9, "seed": 3},
    "top-k": {"temperature": 1.2, "top_k": 12, "seed": 4},
    "top-p": {"temperature": 1.0, "top_p": 0.7, "seed": 5},
    "min-p": {"temperature": 1.5, "min_p": 0.1, "seed": 6},
    "typical-p": {"temperature": 1.0, "typical_p": 0.6, "seed": 7},
    "epsilon, eta": {"temperature": 1.0, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "seed": 8},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "temperature": 0.8,
        "seed": 9,
    },
    "n-grams": {"no_repeat_ngram_size": 2},
    "bans": {"bad_words": [[3], [9, 4]], "suppress_tokens": [11], "begin_suppress_tokens": [12]},
    "bias": {"logit_bias": [[[13], 2.5], [[9, 2, 14], 9.0]], "temperature": 1.0, "seed": 10},
    "allowed": {"allowed": [2, 3, 5, 8, 13, 21, 34, 55], "temperature": 2.0, "seed": 11},
    "samples": {"temperature": 1.0, "seed": 2**64 - 1, "n": 3},
    "likelihoods": {"temperature": 0.7, "top_k": 20, "seed": 12, "logprobs": 3},
    "greedy likelihoods": {"repetition_penalty": 1.2, "logprobs": 2},
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ort-cpu bundles by what is particular about their heads."""
    folder = tmp_path_factory.mktemp("cpp")
    model = save_model(folder / "model", llama_config(max_position_embeddings=160))
    fp32 = export(ExportOptions(model=str(model), output=folder / "fp32")).path
    int8 = quantize(QuantizeOptions(bundle=fp32, output=folder / "int8", head="int8")).path
    toy = write_bundle(folder / "toy", byte_level())
    counts = count_texts(folder / "counts.parquet", toy)
    pruned = prune(
        PruneOptions(
            bundle=toy.path, output=folder / "pruned", counts=counts, least=1, mode="output"
        )
    ).path
    return {
        "fp32": _lowered(fp32, folder / "fp32-cpu"),
        "int8": _lowered(int8, folder / "int8-cpu"),
        "pruned": _lowered(pruned, folder / "pruned-cpu"),
    }


def _lowered(bundle: Path, output: Path) -> Path:
    return lower(LowerOptions(bundle=bundle, output=output, target="ort-cpu")).path


def python_replies(bundle: Path, prompts: list[list[int]]) -> list[Any]:
    with Generator(bundle, threads=1) as generator:
        return [
            generator.generate(prompts, max_new_tokens=16, **options)
            for options in REQUESTS.values()
        ]


def cpp_replies(
    build: Path, onnxruntime: Path, bundle: Path, prompts: list[list[int]], folder: Path, rows: int
) -> dict[str, Any]:
    requests, replies = folder / "requests.json", folder / "replies.json"
    options = [{"max_new_tokens": 16} | options for options in REQUESTS.values()]
    requests.write_text(json.dumps([{"prompts": prompts, "options": each} for each in options]))
    done = subprocess.run(
        [build / "tests" / "run_requests", bundle, requests, replies, str(rows)],
        env=SANITIZER_OPTIONS | {"HEADPORT_ORT": str(onnxruntime)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(replies.read_text())
    return found


@pytest.mark.parametrize("kind", ["fp32", "int8", "pruned"])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_same_seed_gives_the_same_tokens(build, onnxruntime, bundles, kind, rows, tmp_path):
    bundle = bundles[kind]
    prompts = PROMPTS if kind == "pruned" else [*PROMPTS, LONG]
    found = cpp_replies(build, onnxruntime, bundle, prompts, tmp_path, rows)
    vocabulary = Bundle.open(bundle, verify=False).manifest.vocabulary
    assert found["vocab_size"] == vocabulary.size
    assert found["kept_size"] == (vocabulary.kept_size or vocabulary.size)
    assert (vocabulary.kept_size is not None) == (kind == "pruned")
    expected = python_replies(bundle, prompts)
    for name, wanted, given in zip(REQUESTS, expected, found["requests"], strict=True):
        replies = given["replies"]
        assert [r["token_ids"] for r in replies] == [w.token_ids for w in wanted], name
        assert [r["finish_reason"] for r in replies] == [w.finish_reason for w in wanted], name
        assert [(r["prompt"], r["sample"]) for r in replies] == [
            (w.index, w.sample) for w in wanted
        ], name
        check_streamed(given)
        check_likelihoods(wanted, replies)
    lengths = {len(reply["token_ids"]) for each in found["requests"] for reply in each["replies"]}
    # The toy that was pruned never says its end token.
    assert len(lengths) > 1 or kind == "pruned", (
        "no reply ended early, so no row took another's place"
    )


def check_streamed(given: dict[str, Any]) -> None:
    for reply in given["replies"]:
        of_reply = [t for t in given["streamed"] if t[:2] == [reply["prompt"], reply["sample"]]]
        assert [t[2] for t in of_reply] == list(range(len(reply["token_ids"])))
        assert [t[3] for t in of_reply] == reply["token_ids"]


def check_likelihoods(wanted: list[Any], replies: list[dict[str, Any]]) -> None:
    for expected, reply in zip(wanted, replies, strict=True):
        likelihoods = reply.get("logprobs", [])
        assert len(likelihoods) == len(expected.logprobs)
        for each, (logprob, processed, top) in zip(expected.logprobs, likelihoods, strict=True):
            assert logprob == pytest.approx(each.logprob, abs=1e-4)
            assert processed == pytest.approx(each.processed_logprob, abs=1e-4)
            assert [rank[0] for rank in top] == [t.token_id for t in each.top_logprobs]
            assert [rank[1] for rank in top] == pytest.approx(
                [t.logprob for t in each.top_logprobs], abs=1e-4
            )
