"""Bytes of a bundle's tensors: all of them, and those that a step reads."""

from __future__ import annotations

from pathlib import Path

from headport.bundle import Bundle

__all__ = ["read_bytes", "weight_bytes"]


def weight_bytes(bundle: Path) -> int:
    """Bytes of all tensors of a bundle, each counted once."""
    return sum(tensor.length for tensor in Bundle.open(bundle, verify=False).manifest.tensors)


def read_bytes(bundle: Path) -> int:
    """Bytes of the tensors that a step reads whole: all but what it looks rows up in.

    That is an embedding that is no head, and the original weight of a head that gives candidates.
    """
    manifest = Bundle.open(bundle, verify=False).manifest
    rows = (manifest.vocabulary.size, manifest.vocabulary.padded_size)
    forms = [head.candidates for head in manifest.heads.values()]
    originals = {form.original for form in forms if form is not None}
    return sum(
        tensor.length
        for tensor in manifest.tensors
        if tensor.name not in originals
        and (
            tensor.shape[0] not in rows
            or any(not consumer.startswith("backbone:") for consumer in tensor.consumers)
        )
    )
