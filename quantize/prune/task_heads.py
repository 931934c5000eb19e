"""Heads that are not of a vocabulary, when the vocabulary becomes smaller."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from headport.errors import QuantizeError
from headport.manifest import AdaptiveHead, Manifest, TaskHead, TreeHead

__all__ = ["refuse_clusters", "renumbered"]

Int64 = npt.NDArray[np.int64]


def refuse_clusters(manifest: Manifest, where: str) -> None:
    """Refuse heads that keep their tokens in clusters.

    Raises:
        QuantizeError: Naming them.
    """
    kinds = (AdaptiveHead, TreeHead)
    names = [name for name, head in manifest.task_heads.items() if isinstance(head, kinds)]
    if names:
        raise QuantizeError(
            f"{where}: {', '.join(names)} keep their tokens in clusters, of which no rows can be "
            "taken out in this release; prune a bundle without them"
        )


def renumbered(manifest: Manifest, kept: Int64) -> dict[str, TaskHead]:
    """Heads with the new ids of their padding tokens.

    Args:
        manifest: Of the bundle before.
        kept: Ids that stay, in their new order, [K].

    Raises:
        QuantizeError: If a padding token would not stay.
    """
    found: dict[str, TaskHead] = {}
    for name, head in manifest.task_heads.items():
        old = getattr(head, "pad_id", None)
        if old is None:
            found[name] = head
            continue
        places = np.flatnonzero(kept == old)
        if not len(places):
            raise QuantizeError(
                f"head {name} pools before its padding token {old}, which would not be kept; name "
                f"it in the --keep file as id:{old}"
            )
        found[name] = msgspec.structs.replace(head, pad_id=int(places[0]))
    return found
