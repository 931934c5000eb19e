"""Build records of TensorRT plans: what each was made from, for what, and what is inside.

A plan is a black box that only its own GPU, driver and library can open, so all that must be known
about it stands in `engines/<graph>.json` beside `engines/<graph>.plan`.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.gpu_probe import GpuProbe
from headport.manifest import Manifest, Port

__all__ = [
    "BACKEND_PACKAGES",
    "CARRIES_CODE",
    "FOLDER",
    "MERGED",
    "RECORD_VERSION",
    "STRIPPED",
    "EngineProfile",
    "EngineRecord",
    "WeightProof",
    "bundle_digest",
    "installed_backend",
    "read_engines",
    "rebuild_advice",
    "strangers",
    "unusable",
]

FOLDER = "engines"
MERGED = "merged"  # graph name of a plan that holds backbone and head
RECORD_VERSION = 1
STRIPPED = "STRIP_PLAN"  # flag of a plan without weights
CARRIES_CODE = "VERSION_COMPATIBLE"  # flag of a plan that later versions load
# Backend → distributions that bring it.
BACKEND_PACKAGES = {
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt-rtx": ("tensorrt-rtx", "tensorrt-rtx-cu12", "tensorrt-rtx-cu13"),
}


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every record."""


class EngineProfile(_Strict, frozen=True):
    """Shapes an engine takes: input → smallest, most usual, largest."""

    name: str
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


class WeightProof(_Strict, frozen=True):
    """A head's weight, looked for in the plan byte by byte."""

    weight: str  # its name in the tensor ledger
    dtype: str  # as the bundle stores it
    elements: int
    stored_bytes: int
    plan_bytes_per_element: float  # of the whole plan, which also holds kernels and other weights
    found: bool  # the plan holds exactly the stored values
    layout: Literal["rows", "columns"] | None  # in which order it holds them


class EngineRecord(_Strict, frozen=True):
    """One plan. It was built; whether it answers right only a run on its GPU can tell."""

    schema_version: int
    status: Literal["built"]
    graph: str  # of the bundle's graphs, or `merged`
    plan: str  # file in the bundle
    plan_sha256: str
    plan_bytes: int
    bundle_sha256: str  # `bundle_digest` of what it was made from
    graph_sha256: str  # of the ONNX file that was parsed
    checkpoint_sha256: str
    backend: str
    backend_version: str
    compute_capabilities: tuple[str, ...]  # empty: the backend's own choice
    flags: tuple[str, ...]  # builder flags that were on
    workspace_bytes: int | None  # None: the backend's own limit
    profiles: tuple[EngineProfile, ...]
    inputs: tuple[Port, ...]  # of the parsed network, -1 where a profile gives the size
    outputs: tuple[Port, ...]
    layers: dict[str, int]  # kind → count, before the builder fused them
    types: dict[str, int]  # element type → layers whose first output has it
    weights: tuple[WeightProof, ...]
    log: tuple[str, ...]  # what the builder said, information and warnings
    seconds: float  # of parsing and building
    peak_memory_bytes: int | None  # resident, of the process that built it
    command: str  # that builds it again


def bundle_digest(manifest: Manifest) -> str:
    """sha256 over the graphs and tensors that decide a bundle's answers, by name and checksum."""
    names = {graph.file for graph in manifest.graphs.values()}
    names |= {tensor.file for tensor in manifest.tensors}
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(f"{name} {manifest.files[name].sha256}\n".encode())
    return digest.hexdigest()


def read_engines(bundle: Bundle) -> dict[str, EngineRecord]:
    """The build records a bundle carries: graph name → record.

    Raises:
        BundleError: If one cannot be read.
    """
    found = {}
    for name in bundle.manifest.files:
        if not name.startswith(f"{FOLDER}/") or not name.endswith(".json"):
            continue
        try:
            record = msgspec.json.decode(bundle.file(name).read_bytes(), type=EngineRecord)
        except (OSError, msgspec.DecodeError) as error:
            raise BundleError(f"{name}: not a build record that is known here ({error})") from error
        if record.schema_version != RECORD_VERSION:
            raise BundleError(
                f"{name}: build record version {RECORD_VERSION} expected, "
                f"{record.schema_version} found; build it again: {record.command}"
            )
        if record.graph in found:
            raise BundleError(
                f"{name}: one build record of each graph expected, a second one of {record.graph} "
                f"found; build it again: {record.command}"
            )
        found[record.graph] = record
    return found


def rebuild_advice(folder: Path) -> str:
    """The commands that would build a damaged bundle's plans again, as the end of a message."""
    commands: dict[str, None] = {}
    for file in sorted((folder / FOLDER).glob("*.json")):
        try:
            commands[msgspec.json.decode(file.read_bytes(), type=EngineRecord).command] = None
        except (OSError, msgspec.DecodeError):
            continue
    return "; if a plan is damaged, build it again: " + " && ".join(commands) if commands else ""


def strangers(bundle: Bundle, record: EngineRecord) -> list[str]:
    """Why a plan is not one of this bundle; empty where it is."""
    manifest = bundle.manifest
    faults = []
    entry = manifest.files.get(record.plan)
    if entry is None:
        faults.append(f"{record.plan} is missing")
    elif entry.sha256 != record.plan_sha256:
        faults.append(
            f"{record.plan} is another plan (sha256 {record.plan_sha256[:16]}… expected, "
            f"{entry.sha256[:16]}… found)"
        )
    graph = manifest.graphs.get(record.graph)
    if graph is None and record.graph != MERGED:
        faults.append(f"{record.plan} is of a graph {record.graph!r} that is not here")
    elif graph is not None and record.graph_sha256 != manifest.files[graph.file].sha256:
        faults.append(
            f"{record.plan} was made from another graph than {graph.file} (sha256 "
            f"{record.graph_sha256[:16]}… expected, {manifest.files[graph.file].sha256[:16]}… "
            "found)"
        )
    if record.bundle_sha256 != bundle_digest(manifest):
        faults.append(
            f"{record.plan} was made from another bundle (its graphs and tensors had digest "
            f"{record.bundle_sha256[:16]}…, here it is {bundle_digest(manifest)[:16]}…)"
        )
    return faults


def unusable(record: EngineRecord, probe: GpuProbe, version: str | None) -> list[str]:
    """Why a plan cannot be run on this machine; empty where nothing speaks against it.

    Args:
        record: Of the plan.
        probe: What the driver says.
        version: Of the installed backend, None where there is none.
    """
    faults = []
    if version is None:
        faults.append(f"{record.backend} is not installed here")
    elif version != record.backend_version and CARRIES_CODE not in record.flags:
        faults.append(
            f"it was built with {record.backend} {record.backend_version}, {version} is installed; "
            "a plan belongs to its version"
        )
    if not probe:
        faults.append(f"there is no GPU: {probe.fault}")
    elif record.compute_capabilities:
        here = "SM" + probe.gpus[0].compute_capability.replace(".", "")
        if here not in record.compute_capabilities:
            targets = ", ".join(record.compute_capabilities)
            faults.append(f"it was built for {targets}; the GPU here is {here}")
    return faults


def installed_backend(backend: str) -> str | None:
    """Version of the installed backend; None where it is not installed."""
    for package in BACKEND_PACKAGES.get(backend, ()):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None
