"""Domains: named sets of tokens that a bundle carries, to be allowed for a request by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import BundleError, UsageError

__all__ = ["check_domain_name", "domain_names", "read_domain", "write_domain"]

Int64 = npt.NDArray[np.int64]

_FOLDER = "domains"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class _Domain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of a domain."""

    tokenizer_sha256: str  # of the tokenizer.json that the ids belong to
    token_ids: tuple[int, ...]  # as callers see them, ascending


def check_domain_name(name: str) -> None:
    """Refuse a name that is no plain file name.

    Raises:
        UsageError: If it is not.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"a domain's name of letters, digits, . _ - was expected, {name!r} given")


def domain_names(bundle: Bundle) -> tuple[str, ...]:
    """The domains that a bundle carries, sorted."""
    files = (Path(name) for name in bundle.manifest.files)
    return tuple(sorted(f.stem for f in files if f.parent.as_posix() == _FOLDER))


def read_domain(bundle: Bundle, name: str) -> tuple[int, ...]:
    """Token ids of a domain, ascending: what `allowed` takes.

    Raises:
        UsageError: If the bundle carries no such domain; those it has are named.
        BundleError: If the file is damaged, or its ids belong to another tokenizer than the
            bundle's, as after pruning in mode `both`.
    """
    known = domain_names(bundle)
    if name not in known:
        listed = ", ".join(known) or "none"
        raise UsageError(f"{bundle.path}: no domain {name!r} in it (domains: {listed})")
    path = bundle.file(f"{_FOLDER}/{name}.json")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Domain)
    except (OSError, msgspec.MsgspecError) as error:
        raise BundleError(f"{path}: not a domain that can be read ({error})") from error
    own = bundle.manifest.files.get("tokenizer.json")
    if own is None or own.sha256 != found.tokenizer_sha256:
        raise BundleError(
            f"{path}: its ids belong to another tokenizer than the bundle's; save the domain again"
        )
    return found.token_ids


def write_domain(folder: Path, name: str, token_ids: Iterable[int], tokenizer_sha256: str) -> None:
    """Write a domain into a bundle's folder that is being made."""
    ids = tuple(sorted({int(i) for i in token_ids}))
    (folder / _FOLDER).mkdir(exist_ok=True)
    data = msgspec.json.encode(_Domain(tokenizer_sha256=tokenizer_sha256, token_ids=ids))
    (folder / _FOLDER / f"{name}.json").write_bytes(data + b"\n")
