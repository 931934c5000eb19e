"""What is tried: numbers of threads, each waiting by spinning or asleep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from headport.errors import UsageError
from headport.tuned import threads_text

__all__ = ["Candidate", "candidates_of", "thread_counts"]

_MOST = 6  # numbers of threads


class Candidate(msgspec.Struct, frozen=True, order=True):
    """One way to run a bundle; the smaller of two leaves more of the machine to others."""

    threads: int
    spinning: bool  # False of one thread, which waits for none

    def text(self) -> str:
        """In words."""
        return threads_text(self.threads, self.spinning)


def thread_counts(cpus: int, cores: int) -> tuple[int, ...]:
    """Numbers of threads that are tried: powers of two, all cores and all CPUs, ascending.

    Powers of four where that would be more than six.

    Args:
        cpus: CPUs that the process may use.
        cores: Physical cores behind them.
    """
    for step in (1, 2):
        powers = {1 << n for n in range(0, cpus.bit_length(), step)}
        found = tuple(sorted(powers | {cores, cpus}))
        if len(found) <= _MOST:
            break
    return found


def candidates_of(counts: Sequence[int], cpus: int) -> tuple[Candidate, ...]:
    """What is tried of some numbers of threads; the last one has most of them and spins.

    Args:
        counts: Numbers of threads, in any order.
        cpus: CPUs that the process may use.

    Raises:
        UsageError: If a number is below 1 or above `cpus`.
    """
    wrong = [str(count) for count in counts if not 1 <= count <= cpus]
    if wrong:
        raise UsageError(
            f"--threads: numbers from 1 to the {cpus} CPUs that this process may use were "
            f"expected, {', '.join(wrong)} given"
        )
    return tuple(_each(sorted(set(counts))))


def _each(counts: Iterable[int]) -> Iterable[Candidate]:
    for count in counts:
        yield Candidate(count, False)
        if count > 1:
            yield Candidate(count, True)
