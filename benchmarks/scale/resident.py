"""What a process takes, against weights, caches and an empty session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.scale.stored import weight_bytes
from benchmarks.scale.turns import open_child

__all__ = ["within_its_parts"]

_PAST, _STEPS = 256, 8
_SHARE = 1.15


def within_its_parts(bundle: Path, threads: int) -> bool:
    """Print each part; true if the whole is at most 1.15 × (weights + caches) + an empty session.

    Copies that ONNX Runtime stores in another order are told from the rest by a second process
    that is kept from making them; they count to the whole.
    """
    empty = open_child("-", threads)
    base = empty.ask("memory")["VmRSS"]
    empty.close()
    packed, caches = _used(bundle, threads, "")
    unpacked, _ = _used(bundle, threads, "unpacked")
    weights = weight_bytes(bundle)
    limit = _SHARE * (weights + caches) + base
    passed = packed["VmRSS"] <= limit
    rows = {
        "weights of the bundle": weights,
        f"caches of {_PAST + _STEPS} tokens": caches,
        "empty session": base,
        "process": packed["VmRSS"],
        "– its own": packed["RssAnon"],
        "– pages of files": packed["RssFile"],
        "process without copies in another order": unpacked["VmRSS"],
        "– its own ": unpacked["RssAnon"],
        "copies in another order": packed["RssAnon"] - unpacked["RssAnon"],
        f"limit, {_SHARE} × (weights + caches) + empty": limit,
    }
    print("| part | MB |\n|---|---|")
    for name, size in rows.items():
        print(f"| {name} | {size / 1e6:.1f} |")
    share = (packed["VmRSS"] - base) / (weights + caches)
    print(
        f"\n{share:.2f} × (weights + caches) beyond an empty session (at most {_SHARE}): "
        f"{'within' if passed else 'ABOVE'}"
    )
    return passed


def _used(bundle: Path, threads: int, option: str) -> tuple[dict[str, Any], int]:
    child = open_child(bundle, threads, option)
    caches = child.ask("fill", pasts=[_PAST], capacity=_PAST + _STEPS)["cache_bytes"]
    child.ask("steps", slots=[0], count=_STEPS)
    found = child.ask("memory")
    child.close()
    return found, caches
