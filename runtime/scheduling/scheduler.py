"""One thread that owns the runner and works for all others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from headport.errors import ClosedError, OverloadedError, RequestError
from headport.runtime.results import Stats
from headport.runtime.row import Row
from headport.runtime.scheduling.sequences import Job, Listener, RowRequest, RowState, Steps
from headport.runtime.scheduling.tickets import Ticket
from headport.runtime.scheduling.worker import Worker

__all__ = ["Scheduler"]

T = TypeVar("T")


class Scheduler:
    """Takes requests from any thread. Its own thread starts with the first one.

    Args:
        worker: Does the work.
        most_waiting: Rows and jobs that may wait before more are refused.
        stats: Counts; `refused` is written here, all else by the worker.
    """

    def __init__(self, worker: Worker, most_waiting: int, stats: Stats) -> None:
        self._worker = worker
        self._most_waiting = most_waiting
        self._stats = stats
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        # What the threads hand over, and the lock for it.
        self._changed = threading.Condition()
        self._requests: list[list[RowState]] = []
        self._jobs: list[Job] = []
        self._questions: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._waiting = 0  # as `Worker.waiting`, what was just handed over included
        self._free = worker.free
        self._woken = False
        self._closed = False

    def submit(
        self, rows: Sequence[Row], listener: Listener | None, deadline: float | None
    ) -> Ticket:
        """Hand over a request.

        Args:
            rows: Its rows, each continued to its end.
            listener: Called in the scheduler's thread with every token; it must be quick.
            deadline: By the monotonic clock; None = never.

        Raises:
            OverloadedError: If too many rows wait already.
            ClosedError: After `close`, or in a fork of the process that made it.
        """
        self._check_process()
        ticket = Ticket(deadline, self._wake, self._check_waits_outside)
        request = RowRequest(ticket, rows, listener, len(rows))
        with self._changed:
            self._check_room()
            self._waiting += len(rows)
            self._requests.append([RowState(row, n, request) for n, row in enumerate(rows)])
            self._start()
        return ticket

    def run(self, steps: Steps, deadline: float | None = None) -> Any:
        """Run a job between the steps of the rows and wait for its result.

        Args:
            steps: Does a bounded piece of work each time it is advanced; returns the result.
            deadline: By the monotonic clock; None = never.

        Raises:
            ClosedError: After `close`.
        """
        self._check_waits_outside()
        return self.submit_job(steps, deadline).result()

    def _check_waits_outside(self) -> None:
        if threading.current_thread() is self._thread:
            raise RequestError(
                "a listener or a callback must not wait for its own generator, whose only thread "
                "it runs in; hand the work to a thread of your own"
            )

    def submit_job(self, steps: Steps, deadline: float | None, *, counted: bool = False) -> Ticket:
        """As `run`, without waiting; `counted` among the requests."""
        self._check_process()
        ticket = Ticket(deadline, self._wake, self._check_waits_outside)
        with self._changed:
            self._check_room()
            self._waiting += 1
            self._jobs.append(Job(steps, ticket, counted))
            self._start()
        return ticket

    def between_steps(self, ask: Callable[[], T]) -> T:
        """What a function gives while no step is being worked on."""
        if self._forked:
            return ask()
        answer: Future[T] = Future()
        with self._changed:
            idle = self._thread is None or self._closed
            if idle or threading.current_thread() is self._thread:
                return ask()
            self._questions.append((ask, answer))
            self._changed.notify_all()
        return answer.result()

    def close(self) -> None:
        """End all requests and the thread; without effect the second time."""
        if self._forked:
            self._closed = True
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or ended by a fault of its own."""
        return self._closed

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    def _check_process(self) -> None:
        # A fork has no thread but the one that made it, so nobody would do the work. Asked before
        # the lock is taken, which another thread may have held at that moment.
        if self._forked:
            raise ClosedError(
                f"the generator was made in process {self._process} and this is {os.getpid()}, a "
                "fork without its threads; make one in each process, after the fork"
            )

    def _check_room(self) -> None:
        if self._closed:
            raise ClosedError("the generator is closed; make a new one")
        waiting = self._waiting - self._free  # what was just handed over may find a slot
        if waiting >= self._most_waiting:
            self._stats.refused += 1
            raise OverloadedError(
                f"{waiting} rows and jobs wait and the limit is {self._most_waiting}; "
                "try again later"
            )

    def _wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="headport", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        fault: BaseException = ClosedError("the generator was closed before the request was done")
        try:
            while self._take():
                self._worker.step()
        except BaseException as error:
            fault = error
            raise
        finally:
            with self._changed:
                self._closed = True
            self._take()
            self._worker.end(fault)

    def _take(self) -> bool:
        """Pass on what was handed over, waiting while there is nothing to do; False: closed."""
        with self._changed:
            while not (self._closed or self._worker.busy or self._handed_over()):
                self._changed.wait()
            requests, jobs, questions = self._requests, self._jobs, self._questions
            self._requests, self._jobs, self._questions = [], [], []
            self._woken = False
        for ask, answer in questions:
            try:
                answer.set_result(ask())
            except Exception as error:  # noqa: BLE001 - it is the asker's; the thread goes on
                answer.set_exception(error)
        self._worker.take(requests, jobs)
        with self._changed:
            more = sum(len(rows) for rows in self._requests) + len(self._jobs)
            self._waiting, self._free = self._worker.waiting + more, self._worker.free
            return not self._closed

    def _handed_over(self) -> bool:
        return bool(self._woken or self._requests or self._jobs or self._questions)
