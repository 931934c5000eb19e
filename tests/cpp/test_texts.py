"""Texts of the C++ library are Python's: decoded, streamed, stopped, encoded."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

from headport.runtime.text import TextStream, Tokens
from tests.conftest import TEXTS
from tests.cpp.conftest import ROOT, SANITIZER_OPTIONS
from tests.quantize.prune.tokenizers_of import LINES, byte_level, sentencepiece_bpe, unigram
from tests.quantize.prune.toys import tokenizer_bundle

PIECES = (
    *LINES,
    *TEXTS,
    " pumps",
    "12345",
    "  ",
    "\n",
    "\r\n\t",
    "é",
    "心臟",
    "🙂🏽",
    "<|start|>",
    "<note>",
    "<|stop|>",
    "'LL",
    "\u00a0",
    "٣",
    "e\u0301",
    "ﬀ",
    "\u200b",
    "\ufffd",
)


def texts(count: int) -> list[str]:
    """Pieces of many scripts, and random Unicode."""
    rng = random.Random(3)
    ranges = ((32, 127), (9, 14), (160, 0x3000), (0x3000, 0xD800), (0xE000, 0x20000))
    found = []
    for n in range(count):
        if n % 2:
            found.append("".join(rng.choice(PIECES) for _ in range(rng.randint(1, 4))))
        else:
            picks = (rng.choice(ranges) for _ in range(rng.randint(1, 8)))
            found.append("".join(chr(rng.randrange(*pick)) for pick in picks))
    return found


@pytest.fixture
def ask(build: Path, onnxruntime: Path, tmp_path: Path) -> Callable[..., Any]:
    """`ask(tokenizer, decode=…, encode=…, stream=…)` → replies, or what it was refused with."""

    def asked(inner: Tokenizer, library: Path | None = None, **requests: Any) -> Any:
        inner.save(str(tmp_path / "tokenizer.json"))
        requests = {"decode": [], "encode": [], "stream": []} | requests
        (tmp_path / "requests").write_text(json.dumps(requests))
        environment = SANITIZER_OPTIONS | {
            "HEADPORT_ORT": str(onnxruntime),
            "TMPDIR": str(tmp_path),
        }
        if library is not None:
            environment["HEADPORT_TOKENIZER"] = str(library)
        done = subprocess.run(
            [build / "tests" / "text_requests", "tokenizer.json", "requests", "replies"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 1:
            return done.stderr
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "replies").read_text())

    return asked


def byte_pieces() -> Tokenizer:
    return unigram(byte_fallback=True)


@pytest.mark.parametrize("made", [byte_level, sentencepiece_bpe, unigram, byte_pieces])
def test_ids_are_decoded_as_in_python(ask: Any, made: Callable[[], Tokenizer]) -> None:
    inner, rng = made(), random.Random(1)
    size = inner.get_vocab_size() + 3  # ids that do not exist are left out
    lists = [[rng.randrange(size) for _ in range(rng.randint(0, 12))] for _ in range(2000)]
    lists += [inner.encode(text).ids for text in texts(300)]
    expected = [inner.decode(ids, skip_special_tokens=True) for ids in lists]
    assert ask(inner, decode=lists)["decode"] == expected


@pytest.mark.parametrize("made", [byte_level, sentencepiece_bpe, byte_pieces])
def test_texts_grow_and_stop_as_in_python(
    ask: Any, made: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    inner, rng = made(), random.Random(2)
    tokens = Tokens(tokenizer_bundle(tmp_path / "bundle", inner))
    requests, expected = [], []
    for n, text in enumerate(texts(200)):
        ids = inner.encode(text).ids + [rng.randrange(300) for _ in range(n % 4)]
        whole = inner.decode(ids)
        stop = [s for s in (whole[3:6], whole[-4:-2], "zz", "heart f") if s][: n % 4]
        requests.append({"ids": ids, "stop": stop})
        stream = TextStream(tokens, stop)
        parts = [*(stream.push(i) for i in ids), stream.finish()]
        expected.append({"parts": parts, "text": stream.text, "stopped": stream.stopped})
    assert sum(each["stopped"] for each in expected) > 40
    assert ask(inner, stream=requests)["stream"] == expected


def test_a_decoder_that_is_not_known_is_refused(ask: Any) -> None:
    inner = byte_level()
    inner.decoder = decoders.WordPiece()
    assert "unsupported" in ask(inner) and "the decoder WordPiece" in ask(inner)


_LIBRARY = "libonnxruntime-genai.so"


def tokenizer_library() -> Path:
    """ONNX Runtime GenAI's shared library; skips where there is none."""
    places = [Path(os.environ.get("HEADPORT_TOKENIZER", "")), ROOT / "build" / "genai"]
    for module in ("onnxruntime_genai_core", "onnxruntime_genai"):
        spec = find_spec(module)
        if spec is not None and spec.origin is not None:
            places.append(Path(spec.origin).parent)
    for place in places:
        for file in (
            place,
            place / "libonnxruntime-genai.so",
            place / "bin/libonnxruntime-genai.so",
        ):
            if file.is_file():
                return file
    pytest.skip(
        "ONNX Runtime GenAI's library is not there; `sh runtime/cpp/fetch_tokenizer.sh` gets it"
    )


def test_texts_are_encoded_as_in_python(ask: Any) -> None:
    inner, given = byte_level(), ["", " ", *texts(3000)]
    found = ask(inner, tokenizer_library(), encode=given)
    inner.no_padding()
    assert found["encode"] == [inner.encode(text).ids for text in given]
    assert found["encode"][2][-1] == inner.token_to_id("<|stop|>")  # which the template adds


def digits(inner: Tokenizer) -> None:
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )


def prefix_space(inner: Tokenizer) -> None:
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def normalizer(inner: Tokenizer) -> None:
    inner.normalizer = normalizers.NFC()


def overlapping(inner: Tokenizer) -> None:
    inner.add_special_tokens(["<|stop|>x"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (digits, "Digits"),
        (prefix_space, "without add_prefix_space"),
        (normalizer, "no normalizer"),
        (overlapping, "none overlaps another"),
    ],
)
def test_tokenizers_whose_ids_would_differ_are_refused(
    ask: Any, change: Callable[[Tokenizer], None], words: str
) -> None:
    inner = byte_level()
    change(inner)
    found = ask(inner, encode=["a"])  # before any library is looked for
    assert "unsupported" in found and words in found and "give ids" in found


def test_byte_pieces_and_unigrams_are_refused(ask: Any) -> None:
    assert "no normalizer" in ask(sentencepiece_bpe(), encode=["a"])
    assert "a model of type BPE" in ask(unigram(), encode=["a"])


def test_a_missing_or_foreign_tokenizer_library_is_refused(ask: Any, build: Path) -> None:
    assert "none is named" in ask(byte_level(), encode=["a"])
    assert "could not be loaded" in ask(byte_level(), Path("/nowhere.so"), encode=["a"])
    [own] = build.glob("libheadport.so.?")
    assert "a library without OgaCreateTokenizerFromPath" in ask(byte_level(), own, encode=["a"])
