"""All requests, step by step, in one thread.

    waiting ─► a slot: prompt in chunks ─► one token per step ─► end
       jobs (scores, logits, beams) one after the other: one piece per step

A step is: a bounded piece of prompts, then one run of the backbone for all rows that have their
prompt, then one choice for each. So a long prompt holds the others up by a chunk at a time, and
requests with different parameters share every run. What fails ends its own request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from headport.runtime.results import Stats
from headport.runtime.sampling.choice import Choice
from headport.runtime.scheduling.sequences import Chooser, Job, RowState
from headport.runtime.scheduling.slot_table import SlotTable
from headport.runtime.scheduling.tickets import Ticket
from headport.slots import Slots

__all__ = ["Worker"]

Float32 = npt.NDArray[np.float32]


class Worker:
    """Knows no other thread.

    Args:
        open_slots: Makes the slots; called when the first row needs one.
        count: Slots: rows that are worked on at once.
        chunk: Prompt tokens per run.
        reuse: Take over what earlier prompts have left in a slot.
        chooser: Chooses tokens.
        stats: Where it counts.
    """

    def __init__(
        self,
        open_slots: Callable[[], Slots],
        *,
        count: int,
        chunk: int,
        reuse: bool,
        chooser: Chooser,
        stats: Stats,
    ) -> None:
        self._open_slots = open_slots
        self._count = count
        self._chunk = chunk
        self._reuse = reuse
        self._chooser = chooser
        self._stats = stats
        self._table: SlotTable | None = None
        self._waiting: deque[RowState] = deque()
        self._running: list[RowState] = []
        self._jobs: deque[Job] = deque()

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._running or self._jobs)

    @property
    def waiting(self) -> int:
        """Rows that have no slot, and jobs."""
        return len(self._waiting) + len(self._jobs)

    @property
    def free(self) -> int:
        """Slots that hold no row."""
        return self._count - len(self._running)

    def take(self, requests: Iterable[list[RowState]], jobs: Iterable[Job]) -> None:
        """Take over requests, each as its rows, and jobs; end what must end, and fill slots."""
        for rows in requests:
            self._stats.requests += 1
            self._waiting.extend(rows)
        for job in jobs:
            self._stats.requests += job.counted
            self._jobs.append(job)
        self._drop()
        self._admit()
        self._stats.most_waiting = max(self._stats.most_waiting, self.waiting)

    def step(self) -> None:
        """Do the next bit of everything."""
        self._work_on_jobs()
        self._prefill()
        self._decode()

    def end(self, error: BaseException) -> None:
        """End all requests with an error."""
        for ticket in self._tickets():
            ticket.fail(error)

    def _tickets(self) -> set[Ticket]:
        rows = {state.ticket for state in (*self._waiting, *self._running)}
        return rows | {job.ticket for job in self._jobs}

    def _drop(self) -> None:
        """End requests whose time is over or whose caller is gone."""
        for ticket in self._tickets():
            error = ticket.overdue()
            if error is not None:
                self._end({ticket}, error)
        self._sweep()

    def _sweep(self) -> None:
        """Take what belongs to ended requests out of the queues and the slots."""
        if any(ticket.ended for ticket in self._tickets()):
            self._waiting = deque(s for s in self._waiting if not s.ticket.ended)
            self._jobs = deque(job for job in self._jobs if not job.ticket.ended)
        for state in [s for s in self._running if s.ticket.ended]:
            self._leave(state)

    def _end(self, tickets: set[Ticket], error: BaseException) -> None:
        for ticket in tickets:
            self._stats.count_end(error)
            ticket.fail(error)

    def _fail(self, states: list[RowState], error: BaseException) -> None:
        """End the requests of some rows; what their slots hold is not to be trusted."""
        for state in states:
            self._leave(state, sound=False)
        self._end({s.ticket for s in states}, error)
        self._sweep()

    def _leave(self, state: RowState, *, sound: bool = True) -> None:
        assert self._table is not None
        self._running.remove(state)
        self._forget(state.slot, state)
        self._table.release(state.slot, sound=sound)

    def _forget(self, slot: int, state: RowState) -> None:
        # What a slot reads would be kept for as long as the slot.
        if state.row.source is not None and self._table is not None:
            self._table.slots.sources.put(slot, None)

    def _work_on_jobs(self) -> None:
        if not self._jobs:
            return
        # The first one only: a job may hold a cache of its own.
        job = self._jobs[0]
        try:
            next(job.steps)
            return
        except StopIteration as end:
            job.ticket.succeed(end.value)
        except Exception as error:  # noqa: BLE001 - whatever it is, its caller gets it
            self._end({job.ticket}, error)
        self._jobs.popleft()

    def _admit(self) -> None:
        if self._waiting and self._table is None:
            try:
                slots = self._open_slots()
            except Exception as error:  # noqa: BLE001 - such as memory; the next one tries again
                self._end({s.ticket for s in self._waiting}, error)
                self._sweep()
                return
            self._table = SlotTable(slots, self._count, self._chunk, self._reuse)
            self._stats.cache_bytes = slots.nbytes
        while self._waiting and self._table is not None:
            slot = self._table.take(self._waiting[0].row.prompt_token_ids)
            if slot is None:
                break
            state = self._waiting.popleft()
            state.slot = slot
            self._running.append(state)
            self._stats.most_rows = max(self._stats.most_rows, len(self._running))

    def _prefill(self) -> None:
        """Run chunks of prompts, first come first served, until they are a chunk or more."""
        left = self._chunk
        for state in [s for s in self._running if not s.prefilled]:
            while left > 0 and not state.prefilled and not state.ticket.ended:
                try:
                    left -= self._run_chunk(state)
                except Exception as error:  # noqa: BLE001 - ends this request, not the others
                    self._fail([state], error)

    def _run_chunk(self, state: RowState) -> int:
        table, prompt = self._table, state.row.prompt_token_ids
        assert table is not None
        if state.fed < 0:
            state.fed = table.begin(state.slot, prompt)
            if state.row.source is not None:
                state.row.source.give(table.slots, state.slot)
            self._stats.reused_tokens += state.fed
        chunk = prompt[state.fed : state.fed + self._chunk]
        ids, length = np.array([chunk], np.int64), np.array([len(chunk)], np.int64)
        hidden = table.slots.forward([state.slot], ids, length)
        table.keep(state.slot, chunk)
        state.fed += len(chunk)
        self._stats.prefill_runs += 1
        self._stats.prompt_tokens += len(chunk)
        if state.prefilled:
            state.hidden = hidden[0, len(chunk) - 1].copy()
        return len(chunk)

    def _decode(self) -> None:
        """One token for every row that has its prompt."""
        behind = [s for s in self._running if s.prefilled and s.hidden is None]
        if behind:
            try:
                self._run_step(behind)
            except Exception as error:  # noqa: BLE001 - no row of this run can go on
                self._fail(behind, error)
        ready = [s for s in self._running if s.hidden is not None]
        if not ready:
            return
        hidden = np.stack([s.hidden for s in ready if s.hidden is not None])
        for state, choice in zip(ready, self._choose(hidden, ready), strict=True):
            state.hidden = None
            if not state.ticket.ended:  # another row of its request may just have failed
                self._accept(state, choice)

    def _run_step(self, behind: list[RowState]) -> None:
        assert self._table is not None
        behind.sort(key=lambda s: s.slot)
        packed = self._table.pack([s.slot for s in behind])
        if packed is not None:
            self._forget(packed[0], behind[-1])
            behind[-1].slot = packed[1]
            behind.sort(key=lambda s: s.slot)
            self._stats.moved_rows += 1
        ids = np.array([[s.row.token_ids[-1]] for s in behind], np.int64)
        slots, ones = [s.slot for s in behind], np.ones(len(behind), np.int64)
        hidden = self._table.slots.forward(slots, ids, ones)
        self._stats.steps += 1
        for state, states in zip(behind, hidden[:, 0], strict=True):
            state.hidden = states

    def _choose(self, hidden: Float32, ready: list[RowState]) -> list[Choice | Exception]:
        try:
            return list(self._chooser.choose(hidden, [s.row for s in ready]))
        except Exception as error:  # noqa: BLE001 - such as memory: their callers get it
            if len(ready) == 1:
                return [error]
        # A choice depends on its own row alone, so each is made again, by itself.
        return [self._choose(hidden[n : n + 1], ready[n : n + 1])[0] for n in range(len(ready))]

    def _accept(self, state: RowState, choice: Choice | Exception) -> None:
        try:
            if isinstance(choice, Exception):
                raise choice
            token = state.row.accept(choice)
            if state.request.listener is not None:
                state.request.listener(state.place, token)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - ends this request alone
            self._fail([state], error)
            return
        self._stats.new_tokens += 1
        if state.row.finish_reason is not None:
            self._leave(state)
            state.request.left -= 1
            if state.request.left == 0:
                state.ticket.succeed(state.request.rows)
