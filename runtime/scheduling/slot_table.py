"""Which sequence is in which slot, and which prompts' beginnings are still there.

A prompt is run in chunks of a fixed width, on a grid that starts at its first token, alone. So a
chunk's keys and values depend on the tokens up to its end and on nothing else, bit for bit, and a
prompt that begins with the same chunks takes them over instead of computing them again: its reply
is the one it would have had without.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headport.slots import Slots

__all__ = ["SlotTable"]


class SlotTable:
    """The slots of one scheduler.

    Args:
        slots: Caches, all empty.
        count: How many.
        chunk: Tokens of a chunk.
        reuse: Take over what an earlier prompt has left.
    """

    def __init__(self, slots: Slots, count: int, chunk: int, reuse: bool) -> None:
        self.slots = slots
        self.chunk = chunk
        self._reuse = reuse and slots.divisible
        self._taken = [False] * count
        self._kept: list[list[int]] = [[] for _ in range(count)]  # whole chunks in each slot
        self._used = [0] * count  # when a slot was last let go
        self._clock = 0

    @property
    def taken(self) -> int:
        """Slots that hold a sequence in progress."""
        return sum(self._taken)

    def take(self, prompt: Sequence[int]) -> int | None:
        """A slot for a prompt: one whose chunks it all takes over, else the one longest unused."""
        free = [slot for slot, taken in enumerate(self._taken) if not taken]
        if not free:
            return None
        slot = min(free, key=lambda s: (-self._gain(s, prompt), self._used[s]))
        self._taken[slot] = True
        return slot

    def _gain(self, slot: int, prompt: Sequence[int]) -> int:
        common = self._common(slot, prompt)
        # Where some of its chunks would be lost, what is common is rather copied.
        return 0 if self.slots.movable and common < len(self._kept[slot]) else common

    def begin(self, slot: int, prompt: Sequence[int]) -> int:
        """Prepare a taken slot for its prompt; how many tokens of it are there already."""
        best = slot
        if self.slots.movable:
            best = max(range(len(self._kept)), key=lambda s: (self._common(s, prompt), s == slot))
        length = self._common(best, prompt)
        if best == slot:
            self.slots.cut(slot, length)
        else:
            self.slots.copy(best, slot, length)
        self._kept[slot] = list(prompt[:length])
        return length

    def keep(self, slot: int, chunk: Sequence[int]) -> None:
        """A chunk of the slot's prompt has been run."""
        if len(chunk) == self.chunk:
            self._kept[slot].extend(chunk)

    def release(self, slot: int, *, sound: bool = True) -> None:
        """Let a slot go; what it keeps may be taken over unless it is not `sound`."""
        self._taken[slot] = False
        self._clock += 1
        self._used[slot] = self._clock
        if not sound:
            self._kept[slot] = []
            self.slots.cut(slot, 0)

    def pack(self, running: Collection[int]) -> tuple[int, int] | None:
        """Close a gap between running slots by a copy of the last one; (from, to) where done.

        What the last one leaves behind stays there for others to take over.
        """
        if not self.slots.movable or len(running) == 0:
            return None
        first, last = min(running), max(running)
        gap = next((slot for slot in range(first, last) if not self._taken[slot]), None)
        if gap is None:
            return None
        self.slots.copy(last, gap, int(self.slots.lengths[last]))
        self._kept[gap] = list(self._kept[last])
        self._taken[gap] = True
        self.release(last)
        return last, gap

    def _common(self, slot: int, prompt: Sequence[int]) -> int:
        """Tokens at the start of a prompt that a slot keeps: whole chunks, and never all of it."""
        if not self._reuse:
            return 0
        kept = self._kept[slot]
        most = min(len(kept), (len(prompt) - 1) // self.chunk * self.chunk)
        for start in range(0, most, self.chunk):
            stop = start + self.chunk
            if kept[start:stop] != list(prompt[start:stop]):
                return start
        return most
