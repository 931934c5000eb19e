"""What a process takes, against weights, caches and an empty session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.scale.stored import weight_bytes
from benchmarks.scale.turns import open_child

__all__ = ["within_its_parts"]

_PAST, _STEPS = 256, 8
_SHARE = 1.15


def within_its_parts(bundle: Path, threads: int) -> bool:
    """Print each part; true if the whole is at most 1.15 × (weights + caches) + an empty session.

    What ONNX Runtime copies into another order for its kernels is the growth of the process's own
    memory by loading, beyond that of a second process that is kept from copying. Copies count to
    the whole.
    """
    empty = open_child("-", threads)
    base = empty.ask("memory")["VmRSS"]
    empty.close()
    packed = _used(bundle, threads, "")
    unpacked = _used(bundle, threads, "unpacked")
    weights, caches = weight_bytes(bundle), packed.caches
    limit = _SHARE * (weights + caches) + base
    whole = packed.used["VmRSS"]
    passed = whole <= limit
    rows = {
        "weights of the bundle": weights,
        f"caches of {_PAST + _STEPS} tokens": caches,
        "empty session": base,
        "process": whole,
        "– its own": packed.used["RssAnon"],
        "– pages of files": packed.used["RssFile"],
        "copies in another order": packed.loaded["RssAnon"] - unpacked.loaded["RssAnon"],
        "process without such copies": unpacked.used["VmRSS"],
        f"limit, {_SHARE} × (weights + caches) + empty": limit,
    }
    print("| part | MB |\n|---|---|")
    for name, size in rows.items():
        print(f"| {name} | {size / 1e6:.1f} |")
    share = (whole - base) / (weights + caches)
    print(
        f"\n{share:.2f} × (weights + caches) beyond an empty session (at most {_SHARE}): "
        f"{'within' if passed else 'ABOVE'}"
    )
    return passed


@dataclass(frozen=True)
class _Memory:
    loaded: dict[str, int]  # resident bytes by kind, before the first run
    used: dict[str, int]  # after a prompt and some steps
    caches: int  # bytes


def _used(bundle: Path, threads: int, option: str) -> _Memory:
    child = open_child(bundle, threads, option)
    loaded = child.ask("memory")
    caches = child.ask("fill", pasts=[_PAST], capacity=_PAST + _STEPS)["cache_bytes"]
    child.ask("steps", slots=[0], count=_STEPS)
    found = _Memory(loaded, child.ask("memory"), caches)
    child.close()
    return found
