"""Beam search over a table of log-probabilities, small enough to follow by hand."""

import math

import numpy as np
import pytest

from headport.runtime.sampling.beam_state import BeamState
from headport.runtime.sampling.settings import Beams

IDS = np.array([2, 5, 9])  # 9 ends a reply
END = 9


def state_of(beams: Beams, limit: int = 4) -> BeamState:
    return BeamState(beams, limit, 1, lambda t: t[-1] == END or len(t) == limit)


def ln(*rows: tuple[float, ...]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows))


def test_the_best_continuations_of_all_beams_stay_open():
    state = state_of(Beams(2))
    assert state.advance(ln((0.5, 0.4, 0.1)), IDS) == [0, 0]
    assert [beam.token_ids for beam in state.open] == [(2,), (5,)]
    # .5 · .1 and .5 · .2 lose to .4 · .6 and .4 · .3
    assert state.advance(ln((0.1, 0.2, 0.0), (0.6, 0.3, 0.1)), IDS) == [1, 1]
    assert [beam.token_ids for beam in state.open] == [(5, 2), (5, 5)]
    assert state.open[0].log_p == pytest.approx(math.log(0.24))


def test_equal_scores_go_to_the_better_beam_and_the_lower_id():
    state = state_of(Beams(2))
    assert state.advance(ln((0.4, 0.4, 0.2)), IDS) == [0, 0]
    assert state.advance(ln((0.5, 0.5, 0.0), (0.5, 0.5, 0.0)), IDS) == [0, 0]
    assert [beam.token_ids for beam in state.open] == [(2, 2), (2, 5)]


def test_an_end_beyond_the_best_num_beams_is_not_complete():
    state = state_of(Beams(2))
    state.advance(ln((0.5, 0.3, 0.2)), IDS)
    assert state.complete == []  # the end token came third
    state = state_of(Beams(2))
    state.advance(ln((0.5, 0.2, 0.3)), IDS)
    assert [each.token_ids for each in state.complete] == [(9,)]
    assert [each.token_ids for each in state.open] == [(2,), (5,)]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_the_score_is_the_sum_over_tokens_to_the_power_of_the_penalty(penalty):
    state = state_of(Beams(1, penalty))
    state.advance(ln((0.6, 0.4, 0.0)), IDS)
    state.advance(ln((0.2, 0.1, 0.7)), IDS)
    [found] = state.best(1)
    assert found.token_ids == (2, 9)
    assert found.score == pytest.approx(math.log(0.42) / 2**penalty)


@pytest.mark.parametrize("early", [False, True, "never"])
def test_early_stopping_ends_with_enough_replies(early):
    state = state_of(Beams(2, 2.0, early))
    state.advance(ln((0.3, 0.2, 0.5)), IDS)
    assert not state.done
    # Complete: ln .5 and ln .18 / 4. Open: ln .14 / 4, better than the worse of them.
    state.advance(ln((0.35, 0.05, 0.6), (0.1, 0.7, 0.2)), IDS)
    assert [each.token_ids for each in state.complete] == [(2, 9), (9,)]
    assert state.done is (early is True)


def test_the_hope_of_an_open_beam_depends_on_early_stopping():
    # Complete: ln .5. Open: ln .45, worse now; at 4 tokens and penalty 1 it would be ln .45 / 4.
    rows = ln((0.45, 0.05, 0.5))
    ends = {}
    for early in (False, "never"):
        state = state_of(Beams(1, 1.0, early))
        state.advance(rows, IDS)
        ends[early] = state.done
    assert ends == {False: True, "never": False}
    # A penalty of 0 leaves nothing to hope for.
    state = state_of(Beams(1, 0.0, "never"))
    state.advance(rows, IDS)
    assert state.done


def test_the_limit_ends_all_beams():
    state = state_of(Beams(2), limit=1)
    state.advance(ln((0.5, 0.3, 0.2)), IDS)
    assert state.done and [each.token_ids for each in state.best(2)] == [(2,), (5,)]


def test_banned_tokens_make_no_beams():
    state = state_of(Beams(4))
    state.advance(ln((0.0, 1.0, 0.0)), IDS)
    assert [beam.token_ids for beam in state.open] == [(5,)] and not state.done
    state.advance(ln((0.0, 0.0, 0.0)), IDS)
    assert state.done and state.best(4) == []


def test_more_end_tokens_keep_more_candidates():
    ends = {3, 4, 5}
    ids = np.arange(6)
    state = BeamState(Beams(1), 9, len(ends), lambda t: t[-1] in ends)
    with np.errstate(divide="ignore"):
        state.advance(np.log(np.array([[0.1, 0.0, 0.0, 0.3, 0.3, 0.3]])), ids)
    assert [beam.token_ids for beam in state.open] == [(0,)]


@pytest.mark.parametrize("penalty", [-1.0, 0.0])
def test_never_looks_ahead_only_where_length_is_rewarded(penalty):
    # Complete: ln .3 and ln .1 (times 2 for penalty -1). Open: ln .4 at two tokens, which is better
    # than the worse of them; at the limit's eight tokens it would not be for penalty -1.
    state = state_of(Beams(2, penalty, "never"), 8)
    state.advance(ln((0.5, 0.2, 0.3)), IDS)
    state.advance(ln((0.8, 0.0, 0.2), (0.1, 0.0, 0.0)), IDS)
    assert [each.token_ids for each in state.complete] == [(9,), (2, 9)]
    assert not state.done
