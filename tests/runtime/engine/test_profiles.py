from __future__ import annotations

import pytest

from headport.errors import UsageError
from headport.manifest import Port
from headport.runtime.engine.profiles import default_profile, parse_profiles, shapes_of

WORDS = ("batch=1:4:16", "sequence=1:128:2048", "past=0:512:4096")
PORTS = (
    Port(name="input_ids", dtype="int64", shape=("batch", "sequence")),
    Port(name="attention_mask", dtype="int64", shape=("batch", "total_sequence")),
    Port(name="past_key_values.0.key", dtype="float16", shape=("batch", 3, "past_sequence", 64)),
    Port(name="fixed", dtype="float", shape=(2, 3)),
)


def test_one_profile_gives_the_shapes_of_every_input():
    [found] = shapes_of(parse_profiles(WORDS, 8192), PORTS)
    assert found.name == "default"
    assert found.shapes == {
        "input_ids": ((1, 1), (4, 128), (16, 2048)),
        "attention_mask": ((1, 1), (4, 640), (16, 6144)),
        "past_key_values.0.key": ((1, 3, 0, 64), (4, 3, 512, 64), (16, 3, 4096, 64)),
    }


def test_named_profiles_for_prompts_and_decoding():
    words = "prefill batch=1 sequence=1:512:2048 past=0 decode batch=1:4:16 sequence=1 past=0:9:99"
    prefill, decode = shapes_of(parse_profiles(words.split(), 8192), PORTS)
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert prefill.shapes["attention_mask"] == ((1, 1), (1, 512), (1, 2048))
    assert decode.shapes["input_ids"] == ((1, 1), (4, 1), (16, 1))


def test_heads_take_the_batch_unless_rows_are_given():
    port = Port(name="hidden_states", dtype="float16", shape=("rows", 8))
    for words, rows in ((WORDS, 16), ((*WORDS, "rows=1:8:64"), 64)):
        [found] = shapes_of(parse_profiles(words, 8192), [port])
        assert found.shapes["hidden_states"][2] == (rows, 8)


def test_equal_profiles_of_a_graph_count_once():
    words = ["a", *WORDS, "b", "batch=1:4:16", "sequence=1", "past=0:1:2"]
    port = Port(name="hidden_states", dtype="float16", shape=("rows", 8))
    assert len(shapes_of(parse_profiles(words, 8192), [port])) == 1


@pytest.mark.parametrize("context", [1, 17, 2048, 8192])
def test_the_default_fits_every_context(context):
    [found] = parse_profiles(default_profile(context), context)
    assert found.sizes["past"][0] == 0 and found.sizes["sequence"][2] <= context


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "batch, sequence and past were expected"),
        (("batch=1", "sequence=1"), "lacks past"),
        (("batch=2:1:3", "sequence=1", "past=0"), r"'batch=2:1:3': 1 ≤ smallest ≤ usual"),
        (("batch=0", "sequence=1", "past=0"), "1 ≤ smallest"),
        (("batch=1:2", "sequence=1", "past=0"), "SMALLEST:USUAL:LARGEST"),
        (("batch=-1", "sequence=1", "past=0"), "one whole number"),
        (("batch=x", "sequence=1", "past=0"), "one whole number"),
        (("width=1", "batch=1", "sequence=1", "past=0"), "'width=1': one of batch"),
        (("batch=1", "batch=2", "sequence=1", "past=0"), "gives batch twice"),
        (("batch=1", "sequence=1:2:99", "past=0"), "sequence up to 99, but the model's context"),
        (("batch=1", "sequence=1", "past=1:2:3"), "no prompt could start"),
        (("a", "batch=1", "sequence=1", "past=0", "a"), "two profiles are called 'a'"),
    ],
)
def test_a_wrong_profile_is_refused_before_anything_is_built(words, message):
    with pytest.raises(UsageError, match=message):
        parse_profiles(words, 64)


def test_all_faults_are_named_at_once():
    with pytest.raises(UsageError) as caught:
        parse_profiles(("batch=0", "width=1", "past=0"), 64)
    assert all(word in str(caught.value) for word in ("batch=0", "width=1", "lacks"))


def test_an_unknown_dimension_of_a_graph_is_refused():
    port = Port(name="x", dtype="float", shape=("frames", 8))
    with pytest.raises(UsageError, match="'frames'"):
        shapes_of(parse_profiles(WORDS, 8192), [port])
