"""Optimisation profiles: what `--profile` says, checked, as shapes of each graph's inputs.

    batch=1:4:16 sequence=1:128:2048 past=0:512:4096
    prefill batch=1 sequence=1:512:2048 past=0 decode batch=1:4:16 sequence=1 past=0:512:4096

Three numbers are smallest, most usual and largest; one is all three. A word without `=` begins a
profile of that name. `rows`, the rows a head takes at once, is the batch's unless given. A mask has
past + sequence slots, so its size follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headport.engines import EngineProfile
from headport.errors import UsageError
from headport.manifest import Port

__all__ = ["Profile", "default_profile", "parse_profiles", "shapes_of"]

Range = tuple[int, int, int]
_DIMENSIONS = ("batch", "sequence", "past", "rows")
_LEAST = {"past": 0}  # all others: 1
_DEFAULT_NAME = "default"


@dataclass(frozen=True)
class Profile:
    """Sizes an engine is built for, by dimension: (smallest, most usual, largest)."""

    name: str
    sizes: dict[str, Range]

    def size(self, symbol: str | int) -> Range:
        """The sizes of a port's dimension, by the symbol that the graph declares.

        Raises:
            UsageError: If the symbol is none that a profile gives.
        """
        if isinstance(symbol, int):
            return (symbol, symbol, symbol)
        if symbol == "total_sequence":
            past, new = self.sizes["past"], self.sizes["sequence"]
            return (past[0] + new[0], past[1] + new[1], past[2] + new[2])
        name = symbol.removesuffix("_sequence")
        if name not in self.sizes:
            raise UsageError(f"a profile cannot say how large the dimension {symbol!r} is")
        return self.sizes[name]


def default_profile(max_context: int) -> tuple[str, ...]:
    """What `--profile` is where it is not given: prompts of up to 2,048 tokens, batches of 4."""
    new, past = min(2048, max_context), min(4096, max_context)
    return (
        "batch=1:1:4",
        f"sequence=1:{min(128, new)}:{new}",
        f"past=0:{min(512, past)}:{past}",
    )


def parse_profiles(words: Iterable[str], max_context: int) -> tuple[Profile, ...]:
    """Read and check `--profile`.

    Args:
        words: Its words in order.
        max_context: Tokens the model can hold.

    Raises:
        UsageError: Naming every fault: an unknown or missing dimension, numbers that are not
            smallest ≤ usual ≤ largest, or profiles with which no prompt could start.
    """
    groups: dict[str, dict[str, Range]] = {}
    faults: list[str] = []
    name = _DEFAULT_NAME
    for word in words:
        dimension, equals, text = word.partition("=")
        if not equals:
            name = word
            if name in groups:
                faults.append(f"two profiles are called {name!r}")
            groups[name] = {}
            continue
        sizes = groups.setdefault(name, {})
        if dimension not in _DIMENSIONS:
            faults.append(f"{word!r}: one of {', '.join(_DIMENSIONS)} was expected before '='")
        elif dimension in sizes:
            faults.append(f"profile {name!r} gives {dimension} twice")
        else:
            found = _range(text, _LEAST.get(dimension, 1))
            if isinstance(found, str):
                faults.append(f"{word!r}: {found}")
            else:
                sizes[dimension] = found
    for profile, sizes in groups.items():
        sizes.setdefault("rows", sizes.get("batch", (1, 1, 1)))
        faults += _missing(profile, sizes)
        faults += [
            f"profile {profile!r}: {key} up to {sizes[key][2]}, but the model's context is "
            f"{max_context} tokens"
            for key in ("sequence", "past")
            if key in sizes and sizes[key][2] > max_context
        ]
    if not groups:
        faults.append("batch, sequence and past were expected")
    elif not faults and all(sizes["past"][0] > 0 for sizes in groups.values()):
        faults.append("no profile has past=0, so no prompt could start")
    if faults:
        raise UsageError("--profile: " + "; ".join(faults))
    return tuple(Profile(name, sizes) for name, sizes in groups.items())


def _missing(profile: str, sizes: dict[str, Range]) -> list[str]:
    missing = [name for name in ("batch", "sequence", "past") if name not in sizes]
    return [f"profile {profile!r} lacks {', '.join(missing)}"] if missing else []


def _range(text: str, least: int) -> Range | str:
    parts = text.split(":")
    if len(parts) not in (1, 3) or not all(part.isascii() and part.isdigit() for part in parts):
        return "one whole number or SMALLEST:USUAL:LARGEST was expected"
    numbers = [int(part) for part in parts]
    low, usual, high = numbers if len(numbers) == 3 else numbers * 3
    if not least <= low <= usual <= high:
        return f"{least} ≤ smallest ≤ usual ≤ largest was expected"
    return (low, usual, high)


def shapes_of(profiles: Iterable[Profile], inputs: Iterable[Port]) -> tuple[EngineProfile, ...]:
    """Profiles as shapes of one graph's inputs, equal ones once.

    Raises:
        UsageError: If an input has a dimension that a profile cannot give.
    """
    ports = [port for port in inputs if any(isinstance(d, str) for d in port.shape)]
    found: list[EngineProfile] = []
    for profile in profiles:
        shapes = {}
        for port in ports:
            sizes = [profile.size(dimension) for dimension in port.shape]
            low, usual, high = (tuple(size[i] for size in sizes) for i in range(3))
            shapes[port.name] = (low, usual, high)
        if not any(each.shapes == shapes for each in found):
            found.append(EngineProfile(name=profile.name, shapes=shapes))
    return tuple(found)
