import numpy as np
import pytest

from headport.errors import PromptError
from headport.runtime.generation_config import Defaults
from headport.runtime.parameters import resolve
from headport.runtime.prompts import DEFAULT_NEW_TOKENS, fit, read_prompts
from headport.runtime.text import Tokens


@pytest.fixture
def tokens(make_bundle) -> Tokens:
    return Tokens(make_bundle())


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("AB", [[32, 33]]),
        (["AB", [5]], [[32, 33], [5]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (np.array([5, 6]), [[5, 6]]),
        (([5, 6],), [[5, 6]]),
    ],
)
def test_texts_and_ids(tokens, prompts, expected):
    found = read_prompts(prompts, tokens, 257)
    assert found == expected
    assert all(type(i) is int for ids in found for i in ids)


@pytest.mark.parametrize("prompts", ["", [""], [[]], ["a", ""]])
def test_empty_prompts(tokens, prompts):
    with pytest.raises(PromptError, match=r"prompt \d is empty"):
        read_prompts(prompts, tokens, 257)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "a list of those was expected, None was given"),
        (5, "a list of those was expected, 5 was given"),
        ([1.5], "prompt 0 is 1.5, a text or a list of ids was expected"),
        (["a", None], "prompt 1 is None, a text or a list of ids was expected"),
        ("ab\udcff", r"whole Unicode characters was expected, '\\udcff' at character 2"),
    ],
)
def test_what_is_no_prompt(tokens, prompts, message):
    with pytest.raises(PromptError, match=message):
        read_prompts(prompts, tokens, 257)


def test_no_prompt_at_all(tokens):
    with pytest.raises(PromptError, match="none was given"):
        read_prompts([], tokens, 257)


def test_all_unknown_ids_are_listed(tokens):
    with pytest.raises(
        PromptError,
        match=r"prompt 0 holds 257, -1, ids from 0 to 256 were expected; prompt 2 holds 1\.5, True",
    ):
        read_prompts([[1, 257, -1], [2], [1.5, True]], tokens, 257)


def limits(lengths, options, *, context=32, reply_limit=0, **defaults):
    request = resolve(options, Defaults(**defaults), len(lengths))
    return fit([[0] * n for n in lengths], request, context, reply_limit)


@pytest.mark.parametrize(("length", "fits"), [(28, True), (29, False), (33, False)])
def test_what_the_call_asks_for_must_fit(length, fits):
    if fits:
        assert limits([length], {"max_new_tokens": 4}) == [4]
        return
    with pytest.raises(
        PromptError, match=f"has {length} tokens and 4 more .* the context holds 32"
    ):
        limits([length], {"max_new_tokens": 4})


def test_presets_are_cut_to_the_context_row_by_row():
    assert limits([1, 30], {}) == [31, 2]
    assert limits([1], {}, context=10**6) == [DEFAULT_NEW_TOKENS]
    assert limits([1, 30], {}, max_new_tokens=8) == [8, 2]
    assert limits([1, 3], {}, max_length=12) == [11, 9]
    assert limits([1], {"max_new_tokens": 20}, max_length=12) == [20]


def test_replies_that_the_call_leaves_open_have_a_limit_of_their_own():
    assert limits([1, 30], {}, reply_limit=7) == [7, 2]
    assert limits([1], {}, max_new_tokens=5, reply_limit=7) == [5]
    assert limits([1], {"max_new_tokens": 20}, reply_limit=7) == [20]


def test_a_prompt_that_fills_all_room_is_refused():
    with pytest.raises(PromptError, match=r"32 tokens and at least 1 .* the context holds 32"):
        limits([32], {})
    with pytest.raises(PromptError, match=r"12 tokens and at least 1 .* max_length holds 12"):
        limits([12], {}, max_length=12)


def test_all_prompts_that_do_not_fit_are_named():
    with pytest.raises(PromptError, match=r"prompt 0 has 40 .*; prompt 2 has 41 .*shorten"):
        limits([40, 1, 41], {"max_new_tokens": 4})
