"""What is tried on machines of every size."""

from __future__ import annotations

import pytest

from headport.errors import UsageError
from headport.runtime.tuning.candidates import Candidate, candidates_of, thread_counts


@pytest.mark.parametrize(
    ("cpus", "cores", "expected"),
    [
        (1, 1, (1,)),
        (2, 2, (1, 2)),
        (4, 2, (1, 2, 4)),
        (12, 6, (1, 2, 4, 6, 8, 12)),
        (24, 12, (1, 4, 12, 16, 24)),
        (64, 32, (1, 4, 16, 32, 64)),
        (192, 96, (1, 4, 16, 64, 96, 192)),
    ],
)
def test_thread_counts(cpus: int, cores: int, expected: tuple[int, ...]) -> None:
    assert thread_counts(cpus, cores) == expected


def test_one_thread_waits_for_none() -> None:
    off, on = Candidate(2, False), Candidate(2, True)
    assert candidates_of((2, 1, 2), 2) == (Candidate(1, False), off, on)
    assert max(candidates_of((1, 2), 2)) == on


def test_more_threads_than_cpus_are_refused() -> None:
    with pytest.raises(UsageError, match=r"from 1 to the 2 CPUs .* expected, 0, 3 given"):
        candidates_of((1, 0, 3), 2)
