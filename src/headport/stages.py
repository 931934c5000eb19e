"""What a verb adds to a bundle's provenance; needs no graph library."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import msgspec

from headport import __version__
from headport.manifest import Manifest, Stage
from headport.session import library_version

__all__ = ["with_stage"]


def with_stage(
    manifest: Manifest,
    name: str,
    options: dict[str, Any],
    report: dict[str, Any],
    *,
    packages: Iterable[str] = (),
) -> Manifest:
    """The manifest with one more stage in its provenance: what was asked for and measured.

    Args:
        manifest: Of the bundle that the verb makes.
        name: The verb.
        options: What was asked for.
        report: What was measured.
        packages: Whose versions count, beside those of every verb.
    """
    versions = {
        "headport": __version__,
        "python": platform.python_version(),
        **{package: version(package) for package in ("numpy", *packages)},
        "onnxruntime": library_version(),
    }
    stage = Stage(stage=name, options=options, versions=versions, report=report)
    stages = (*manifest.provenance.stages, stage)
    provenance = msgspec.structs.replace(manifest.provenance, stages=stages)
    return msgspec.structs.replace(manifest, provenance=provenance)
