import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from headport.errors import BundleError
from headport.runtime.text import TextStream, Tokens

TEXT = "naïve 中文 🙂🏽 a\ufffdb\n"


def tokens_of(inner: Tokenizer, folder, make_bundle) -> Tokens:
    inner.save(str(folder / "tokenizer.json"))
    return Tokens(make_bundle(folder))


@pytest.fixture
def byte_level(make_bundle) -> Tokens:
    return Tokens(make_bundle())


@pytest.fixture
def byte_fallback(tmp_path, make_bundle) -> Tokens:
    """As SentencePiece models are written: few pieces, all else as byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    inner = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>")
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokens_of(inner, tmp_path, make_bundle)


def parts_of(tokens: Tokens, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], str]:
    stream = TextStream(tokens, stop)
    parts = []
    for token_id in ids:
        parts.append(stream.push(token_id))
        if stream.stopped:
            break
    parts.append(stream.finish())
    assert "".join(parts) == stream.text
    return parts, stream.text


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_parts_are_whole_characters_and_join_to_the_decoded_text(kind, request):
    tokens = request.getfixturevalue(kind)
    ids = tokens.encode(TEXT, add_special_tokens=False)
    parts, text = parts_of(tokens, ids)
    assert text == tokens.decode(ids) == TEXT
    assert sum("\ufffd" in part for part in parts) == 1  # the one that is in the text


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_any_ids_stream_to_the_decoded_text(kind, request):
    tokens = request.getfixturevalue(kind)
    rng = random.Random(0)
    known = [256, *tokens.encode("é🙂a b", add_special_tokens=False)]  # broken characters, specials
    for _ in range(300):
        ids = rng.choices(known, k=rng.randrange(1, 12))
        assert parts_of(tokens, ids)[1] == tokens.decode(ids)


def test_a_bad_byte_does_not_take_back_what_was_given(byte_fallback):
    # "é" then a lone first byte: the decoder gives up the whole run of bytes.
    ids = [byte_fallback.encode("a")[-1], 3 + 0xC3, 3 + 0xA9, 3 + 0xC3]
    parts, text = parts_of(byte_fallback, ids)
    assert parts == ["a", "", "", "", "\ufffd" * 3]
    assert text == byte_fallback.decode(ids)


def test_a_half_character_at_the_end_is_given_at_the_end(byte_level):
    ids = byte_level.encode("a🙂")[:3]
    assert parts_of(byte_level, ids)[0] == ["a", "", "", "\ufffd"]


def test_other_decoders_give_their_text_at_the_end(tmp_path, make_bundle):
    inner = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "do": 1, "n": 2, "'": 3, "t": 4}))
    inner.decoder = decoders.WordPiece()
    tokens = tokens_of(inner, tmp_path, make_bundle)
    parts, text = parts_of(tokens, [1, 2, 3, 4])
    assert parts[:-1] == [""] * 4
    assert text == tokens.decode([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abcdef", ("cd",), "ab"),
        ("abcdef", ("xyz",), "abcdef"),
        ("abcdef", ("ef", "de"), "abc"),
        ("ababac", ("abac",), "ab"),
        ("abc", ("abc",), ""),
        ("abx", ("abc",), "abx"),
        ("na🙂x", ("🙂",), "na"),
    ],
)
def test_a_stop_text_ends_the_text_and_no_part_of_it_is_given(byte_level, text, stop, expected):
    parts, found = parts_of(byte_level, byte_level.encode(text), stop)
    assert found == "".join(parts) == expected


def test_what_may_become_a_stop_text_is_held_back(byte_level):
    stream = TextStream(byte_level, ("\n\nUser",))
    given = [stream.push(i) for i in byte_level.encode("a\n\nUs b")]
    assert given == ["a", "", "", "", "", "\n\nUs ", "b"]


def test_a_stop_text_that_was_held_back_still_ends_the_text(byte_fallback):
    stream = TextStream(byte_fallback, ("é",))
    ids = byte_fallback.encode("aé", add_special_tokens=False)
    assert "".join(stream.push(i) for i in ids) == "a" and not stream.stopped
    assert stream.finish() == "" and stream.stopped


def test_training_time_settings_do_not_touch_prompts(tmp_path, make_bundle, byte_level):
    inner = Tokenizer.from_file(str(byte_level_file(make_bundle)))
    inner.enable_truncation(3)
    inner.enable_padding(length=8)
    tokens = tokens_of(inner, tmp_path, make_bundle)
    assert tokens.encode("abcdef") == byte_level.encode("abcdef")


def byte_level_file(make_bundle):
    return make_bundle().path / "tokenizer.json"


def test_leading_ids(byte_level, byte_fallback):
    assert byte_level.leading_ids() == []
    assert byte_fallback.leading_ids() == [1]
    assert byte_fallback.encode("a")[0] == 1
    assert byte_fallback.decode(byte_fallback.encode("a")) == "a"


def test_special_tokens_come_as_texts(tmp_path, make_bundle, byte_level):
    Tokenizer.from_file(str(byte_level_file(make_bundle))).save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "x_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokens(make_bundle(tmp_path)).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("content", [None, "{", '{"model": 3}'])
def test_a_missing_or_broken_tokenizer_is_named(tmp_path, make_bundle, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BundleError, match=r"tokenizer\.json: no usable tokenizer"):
        Tokens(make_bundle(tmp_path))


def test_added_tokens_that_are_not_special_are_text(tmp_path, make_bundle, byte_level):
    inner = Tokenizer.from_file(str(byte_level_file(make_bundle)))
    inner.add_tokens([AddedToken("<tool>", special=False)])
    tokens = tokens_of(inner, tmp_path, make_bundle)
    ids = tokens.encode("a<tool>b<|end|>")
    assert parts_of(tokens, ids)[1] == "a<tool>b"
