"""How many slots a machine's memory holds."""

from __future__ import annotations

import math
from pathlib import Path

from headport.bundle import Bundle
from headport.cache_ports import cache_slots, is_past, is_state
from headport.errors import BundleError, RequestError
from headport.gpu_probe import probe_gpu

__all__ = ["MOST_SLOTS", "available_bytes", "check_beams", "choose_slots", "slot_bytes"]

# Where nothing is said; more rows seldom make a CPU faster. runtime/cpp/src/c_api.cc has the same
# number.
MOST_SLOTS = 16
_SHARE = 0.5  # of what is available, that slots may take where nothing is said
_BYTES = {"float": 4, "float16": 2, "bfloat16": 2}
_MEMORY = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GROUP_USE = Path("/sys/fs/cgroup/memory.current")


def slot_bytes(bundle: Bundle, context: int) -> int:
    """Bytes that one sequence of `context` tokens keeps in the caches, with a learnt prefix.

    Raises:
        BundleError: If a cache has a type that is not known here.
    """
    prefix = bundle.manifest.prefix
    held, total = context + (0 if prefix is None else prefix.tokens), 0
    for port in (port for port in bundle.manifest.backbone.inputs if is_past(port.name)):
        if port.dtype not in _BYTES:
            raise BundleError(
                f"{bundle.path}: caches of {', '.join(_BYTES)} expected, {port.name} is "
                f"{port.dtype}; use the release of headport that wrote the bundle"
            )
        sizes = [d for d in port.shape if isinstance(d, int)]
        length = 1 if is_state(port.name) else cache_slots(held)
        total += math.prod(sizes) * length * _BYTES[port.dtype]
    return total


def available_bytes(device: str = "cpu") -> int | None:
    """Memory that this process may still take; None where the system does not say.

    On a GPU all of its memory: what is taken of it the driver's first calls do not tell.
    """
    if device != "cpu":
        return next((gpu.memory_bytes for gpu in probe_gpu().gpus), None)
    found = []
    try:
        lines = _MEMORY.read_text(encoding="ascii").splitlines()
        kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        found.append(int(kilobytes) * 1024)
        found.append(int(_GROUP_LIMIT.read_text()) - int(_GROUP_USE.read_text()))
    except (OSError, ValueError, StopIteration):  # no Linux, no control group, or no limit ("max")
        pass
    return min(found, default=None)


def choose_slots(asked: int, each: int, context: int, available: int | None) -> int:
    """How many slots to open.

    Args:
        asked: As many, or 0 for as many as are useful and leave memory for others, at least one.
        each: Bytes of one slot.
        context: Tokens of one slot, for messages.
        available: Bytes that may be taken; None = unknown.

    Raises:
        RequestError: If `asked` is negative, or does not fit.
    """
    if asked < 0:
        raise RequestError(f"slots must be from 1 up, or 0 to choose, {asked} was given")
    if asked:
        if available is not None and asked * each > available:
            raise RequestError(
                f"{asked} slots of {context} tokens take {asked * each / 1e9:.1f} GB, "
                f"{available / 1e9:.1f} GB are available; lower slots or max_context"
            )
        return asked
    if available is None or each == 0:
        return MOST_SLOTS
    return max(1, min(MOST_SLOTS, int(available * _SHARE / each)))


def check_beams(bundle: Bundle, beams: int, tokens: int, device: str = "cpu") -> None:
    """Refuse beams whose cache, which is not one of the slots, does not fit in memory.

    Args:
        bundle: The bundle.
        beams: Rows of the cache.
        tokens: Of the longest prompt and its reply.
        device: Where the cache lies.

    Raises:
        RequestError: If they do not fit.
    """
    needed, available = beams * slot_bytes(bundle, tokens), available_bytes(device)
    if available is not None and needed > available:
        raise RequestError(
            f"{beams} beams of {tokens} tokens take {needed / 1e9:.1f} GB, "
            f"{available / 1e9:.1f} GB are available; lower num_beams or max_new_tokens"
        )
