"""A request on its way: what its caller holds while the scheduler works on it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from headport.errors import CancelledRequestError, DeadlineError, RequestError

__all__ = ["Ticket", "deadline_of"]


def deadline_of(timeout: float | None) -> float | None:
    """The moment, by the monotonic clock, when a request that starts now runs out of time.

    Args:
        timeout: Seconds; None = never.

    Raises:
        RequestError: If it is no number above 0.
    """
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or not 0 < timeout <= sys.float_info.max:
        raise RequestError(f"timeout must be seconds above 0, {timeout!r} was given")
    return time.monotonic() + timeout


class Ticket:
    """One request. Its future ends once, with a result or with an error.

    Args:
        deadline: By the monotonic clock; None = never.
        wake: Called when the scheduler has something to see to.
        may_wait: Raises in a thread that must not wait for an end.
    """

    def __init__(
        self,
        deadline: float | None,
        wake: Callable[[], None],
        may_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.future: Future[Any] = Future()
        # Else whoever waits for it could end it, as asyncio does, and nobody would count it.
        self.future.set_running_or_notify_cancel()
        self._start = time.monotonic()
        self._deadline = deadline
        self._wake = wake
        self._may_wait = may_wait
        self._cancelled = False

    @property
    def ended(self) -> bool:
        """Whether there is a result or an error."""
        return self.future.done()

    def cancel(self) -> None:
        """Ask for an early end; without effect on a request that has ended."""
        if not self.ended:
            self._cancelled = True
            self._wake()

    def check_may_wait(self) -> None:
        """Refuse a wait that would never end.

        Raises:
            RequestError: In the scheduler's own thread, while the request runs.
        """
        if not self.ended:
            self._may_wait()

    def result(self) -> Any:
        """Wait for the end.

        Raises:
            HeadportError: What the request ended with.
        """
        try:
            self.check_may_wait()
            return self.future.result()
        except BaseException:
            self.cancel()  # the caller may have been interrupted while it waited
            raise

    def overdue(self) -> Exception | None:
        """Why the request must end now, if it must. For the scheduler."""
        if self._cancelled:
            return CancelledRequestError("the request was cancelled by its caller")
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            return DeadlineError(
                f"the request was not done after {now - self._start:.1f} seconds, its timeout; "
                "allow more time, ask for fewer tokens, or send fewer requests at once"
            )
        return None

    def succeed(self, value: Any) -> None:
        """End with a result. For the scheduler."""
        if not self.ended:
            self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """End with an error. For the scheduler."""
        if not self.ended:
            self.future.set_exception(error)
