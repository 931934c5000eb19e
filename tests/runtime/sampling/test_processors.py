"""Processors on rows that can be checked by hand; golden vectors hold them against transformers."""

import numpy as np
import pytest

from headport.errors import RequestError
from headport.runtime.sampling.allowed import ask_allowed
from headport.runtime.sampling.columns import columns_of
from headport.runtime.sampling.processors import PROCESSORS, apply_processors, overruled
from headport.runtime.sampling.sampler import choose
from headport.runtime.sampling.settings import Context, FixedIds, Sampling

PAST = Context((1, 2), (2, 3), eos_token_ids=(0,))
IDS = np.arange(5)
ROW = np.array([1.0, -2.0, 3.0, 4.0, 0.5])
INF = np.inf


def processed(sampling: Sampling, ids: np.ndarray = IDS, context: Context = PAST) -> list[float]:
    before = ROW.copy()
    found = apply_processors(ROW, ids, sampling, context)
    assert (before == ROW).all()  # a pure function
    return found.tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [1, -2, 3, 4, 0.5]),
        (Sampling(repetition_penalty=2.0), [1, -4, 1.5, 2, 0.5]),
        (Sampling(presence_penalty=1.0), [1, -2, 2, 3, 0.5]),
        (Sampling(frequency_penalty=0.5), [1, -2, 2.5, 3.5, 0.5]),
        (Sampling(logit_bias=(((4,), 2.0), ((2, 3, 0), 1.0), ((1, 4), 9.0))), [2, -2, 3, 4, 2.5]),
        (Sampling(no_repeat_ngram_size=1), [1, -INF, -INF, -INF, 0.5]),
        (Sampling(bad_words=((4,), (3, 1), (1, 2), (0,))), [1, -INF, 3, 4, -INF]),
        (Sampling(min_new_tokens=3), [-INF, -2, 3, 4, 0.5]),
        (Sampling(min_new_tokens=2, min_length=4), [1, -2, 3, 4, 0.5]),
        (Sampling(min_length=5), [-INF, -2, 3, 4, 0.5]),
        (Sampling(allowed=FixedIds((4, 1))), [-INF, -2, -INF, -INF, 0.5]),
        (Sampling(suppress_tokens=(3,), begin_suppress_tokens=(2,)), [1, -2, 3, -INF, 0.5]),
        (Sampling(process_scores=lambda c, s, ids: -s + ids), [-1, 3, -1, -1, 3.5]),
    ],
)
def test_rules(sampling, expected):
    assert processed(sampling) == expected


def test_repeated_pairs():
    context = Context((1, 2, 3, 1), (2, 4, 1), ())
    assert processed(Sampling(no_repeat_ngram_size=2), context=context)[2] == -INF
    assert processed(Sampling(no_repeat_ngram_size=3), context=context) == ROW.tolist()


def test_ids_of_a_pruned_vocabulary_are_original_ids():
    ids = np.array([1, 3, 10, 11, 50])
    assert columns_of(ids, [3, 50, 4, 10**9, 3]).tolist() == [1, 4]
    sampling = Sampling(suppress_tokens=(11, 12), bad_words=((2, 3, 1),), frequency_penalty=1.0)
    assert processed(sampling, ids) == [-INF, -3, 3, -INF, 0.5]
    assert processed(Sampling(allowed=FixedIds((50, 4))), ids) == [-INF] * 4 + [0.5]


def test_what_is_allowed_overrules_earlier_bans_but_not_later_ones():
    banned = Sampling(allowed=FixedIds((1, 2)), bad_words=((1,), (2,)))
    assert overruled(IDS, banned, PAST)
    assert processed(banned) == [-INF, 0, 0, -INF, -INF]
    suppressed = Sampling(allowed=FixedIds((1, 2)), suppress_tokens=(1, 2))
    assert not overruled(IDS, suppressed, PAST)
    with pytest.raises(RequestError, match="ban every token"):
        choose(ROW, IDS, suppressed, None, PAST)


def test_greedy_heeds_processors():
    assert choose(ROW, IDS, Sampling(), None, PAST) == 3
    assert choose(ROW, IDS, Sampling(suppress_tokens=(3,)), None, PAST) == 2


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, ROW.tolist()),
        ([4], [-INF] * 4 + [0.5]),
        (np.array([True, False, False, False, True]), [1, -INF, -INF, -INF, 0.5]),
        (np.array([1, 1, 4], np.int32), [-INF, -2, -INF, -INF, 0.5]),
    ],
)
def test_answers_of_a_callback(answer, expected):
    asked = ask_allowed(Sampling(allowed=lambda _: answer), PAST)
    assert processed(asked) == expected


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "allows no token; allow an end token"),
        (np.zeros(5, bool), "allows no token"),
        ([1.5], "gave float64, token ids or a bool mask"),
        (["a"], "token ids or a bool mask"),
        (np.ones(4, bool), r"bool \[5\] or longer, was expected, bool \[4\] was given"),
    ],
)
def test_answers_that_are_refused(answer, message):
    with pytest.raises(RequestError, match=message):
        choose(ROW, IDS, ask_allowed(Sampling(allowed=lambda _: answer), PAST), None, PAST)


@pytest.mark.parametrize("answer", [np.zeros(4), np.full(5, np.nan), np.full(5, np.inf)])
def test_scores_of_the_caller_that_are_refused(answer):
    with pytest.raises(RequestError, match="process_scores, prompt 0, step 2: scores"):
        processed(Sampling(process_scores=lambda c, s, i: answer))


def test_errors_of_the_caller_are_told():
    with pytest.raises(RequestError, match="step 2 failed: ZeroDivisionError"):
        processed(Sampling(process_scores=lambda c, s, i: 1 / 0))


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda p: p.name)
def test_nothing_acts_by_default(processor):
    assert not processor.acts(Sampling())
    assert list(processor.lifts(Sampling(), PAST)) == []


def test_what_may_be_lifted_is_named():
    def lifted(sampling: Sampling) -> set[int]:
        acting = (p for p in PROCESSORS if p.acts(sampling))
        return {i for p in acting for i in p.lifts(sampling, PAST)}

    assert lifted(Sampling(logit_bias=(((4,), 2.0), ((3, 1), 1.0), ((0,), -1.0)))) == {4, 1}
    assert lifted(Sampling(repetition_penalty=0.9)) == {1, 2, 3}
    assert lifted(Sampling(frequency_penalty=-0.1)) == {2, 3}
    assert (
        lifted(Sampling(repetition_penalty=1.1, presence_penalty=1.0, bad_words=((1,),))) == set()
    )
