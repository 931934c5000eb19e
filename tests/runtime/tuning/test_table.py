"""The choice from times that can be followed by hand."""

from __future__ import annotations

from headport.runtime.tuning.candidates import Candidate
from headport.runtime.tuning.table import Measured, Row, choose, rows_of

ONE, OFF, ON = Candidate(1, False), Candidate(2, False), Candidate(2, True)


def _round(one: float, off: float, on: float, prompts: tuple[float, float, float] = (1, 1, 1)):
    times = zip((ONE, OFF, ON), (one, off, on), prompts, strict=True)
    return {candidate: Measured(ms, prompt, "") for candidate, ms, prompt in times}


def _chosen(*rounds, margin: float = 0.03) -> Candidate:
    return choose(rows_of(rounds), margin).candidate


def test_the_least_is_chosen_wherever_it_stands() -> None:
    assert _chosen(_round(5, 9, 8)) == ONE
    assert _chosen(_round(9, 5, 8)) == OFF
    assert _chosen(_round(9, 8, 5)) == ON


def test_within_the_margin_fewer_threads_and_no_spinning_are_preferred() -> None:
    assert _chosen(_round(10.2, 10.1, 10.0)) == ONE
    assert _chosen(_round(10.4, 10.3, 10.0)) == OFF
    assert _chosen(_round(10.4, 10.31, 10.0)) == ON
    assert _chosen(_round(10.2, 10.1, 10.0), margin=0.0) == ON


def test_saved_threads_are_not_paid_for_by_prompts() -> None:
    assert _chosen(_round(10.2, 10.1, 10.0, (2.0, 1.0, 1.0))) == OFF
    assert _chosen(_round(10.2, 10.1, 10.0, (2.0, 1.5, 1.0))) == ON
    # Of a faster decoder they are: steps are what is chosen for.
    assert _chosen(_round(9.0, 10.1, 10.0, (2.0, 1.0, 1.0))) == ONE


def test_what_slows_a_whole_round_changes_no_ratio() -> None:
    # By medians of milliseconds, 20 and 15, the order would be another.
    rounds = [_round(9, 12, 10), _round(90, 120, 100), _round(20, 30, 15)]
    rows: dict[Candidate, Row] = {row.candidate: row for row in rows_of(rounds)}
    assert [round(rows[each].decode_ratio, 6) for each in (ONE, OFF, ON)] == [0.9, 1.2, 1.0]
    assert (rows[ON].decode_ms, rows[ON].decode_least_ms, rows[ON].decode_most_ms) == (15, 10, 100)
    assert _chosen(*rounds) == ONE


def test_one_odd_round_decides_nothing() -> None:
    assert _chosen(_round(9, 12, 10), _round(9, 1, 10), _round(9, 12, 10)) == ONE
