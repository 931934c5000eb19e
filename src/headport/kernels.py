"""The library of headport's own kernels, which a bundle lowered with `--kernels` needs.

It is C++ that the user builds (`runtime/kernels`), loaded by ONNX Runtime as an operator library. A
session option of the manifest names the version that the graphs were made for.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headport.errors import BundleError, UsageError

__all__ = [
    "ACTIVATION_BITS",
    "ATTENTION",
    "CANDIDATES",
    "COARSE",
    "DOMAIN",
    "FINE",
    "GAMMA",
    "NORMED",
    "OPTION",
    "PRODUCT",
    "PRODUCT_INPUTS",
    "PRODUCT_OUTPUTS",
    "SKIP",
    "SUM",
    "UNGATED",
    "VARIABLE",
    "VERSION",
    "Kernels",
    "needed_kernels",
]

DOMAIN = "headport.kernels"
# Its operators.
PRODUCT, ATTENTION, CANDIDATES = "BlockMatMul", "CachedAttention", "RankedCandidates"
# Of a product: x, weight, scale, skip, gamma → y, x + skip, its norm, what a gate is made of.
SKIP, GAMMA, PRODUCT_INPUTS = 3, 4, 5
SUM, NORMED, UNGATED, PRODUCT_OUTPUTS = 1, 2, 3, 4
ACTIVATION_BITS, FINE, COARSE = "activation_bits", 16, 8  # what a product keeps of activations
OPTION = "headport.kernels"  # among a manifest's session options; its value is the version
VERSION = 4
VARIABLE = "HEADPORT_KERNELS"  # the library's path, where none is given
_BUILD = (
    "build it with `make kernels` (a C++17 compiler and CMake are needed) and give its path, "
    f"build/kernels/libheadport_kernels.so, in {VARIABLE}"
)


@dataclass(frozen=True)
class Kernels:
    """A library that was found."""

    file: Path
    version: int
    instructions: str  # of the CPU, that it uses here: AVX2, portable


def needed_kernels(options: Mapping[str, str], given: Path | None = None) -> Kernels | None:
    """The library that graphs of these session options need; None where they need none.

    Args:
        options: A manifest's session options.
        given: Path of the library; by default what the environment names.

    Raises:
        BundleError: If the manifest asks for a version that this headport does not know.
        UsageError: If no library is named, it cannot be loaded, or it is of another version.
    """
    wanted = options.get(OPTION)
    if wanted is None:
        return None
    if wanted != str(VERSION):
        raise BundleError(
            f"the bundle needs headport's kernels of version {wanted}, this headport knows "
            f"{VERSION}; lower its portable bundle again, or use another headport"
        )
    path = str(given or os.environ.get(VARIABLE, ""))
    if not path:
        raise UsageError(
            "the bundle was lowered with --kernels and needs that library, which was not given; "
            + _BUILD
        )
    found = _load(str(Path(path).absolute()))
    if found.version != VERSION:
        raise UsageError(
            f"{path}: kernels of version {VERSION} were expected, {found.version} were found; "
            + _BUILD
        )
    return found


@cache
def _load(path: str) -> Kernels:
    try:
        library = ctypes.CDLL(path)
        version, name = library.headport_kernels_version, library.headport_kernels_name
    except (OSError, AttributeError) as error:
        raise UsageError(
            f"{path}: not a library of headport's kernels ({error}); {_BUILD}"
        ) from error
    name.restype = ctypes.c_char_p
    return Kernels(Path(path), int(version()), name().decode())
