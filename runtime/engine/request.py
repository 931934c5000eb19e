"""What the process that builds a plan is told, and what it answers."""

from __future__ import annotations

import msgspec

from headport.engines import EngineProfile
from headport.manifest import Port

__all__ = ["BuildAnswer", "BuildRequest", "ParserFault"]


class BuildRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One plan to build."""

    backend: str
    model: str  # path of the .onnx file; its tensors are found beside it
    plan: str  # path to write
    inputs: tuple[Port, ...]  # as the bundle declares them
    profiles: tuple[EngineProfile, ...]
    compute_capabilities: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # members of BuilderFlag to switch on
    workspace_bytes: int | None = None
    timing_cache: str | None = None  # path of a file that is read if there, and written


class ParserFault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing the ONNX parser refused."""

    code: str  # as the library names it, such as UNSUPPORTED_NODE
    node: str
    operator: str
    text: str

    def __str__(self) -> str:
        return f"{self.operator or 'graph'} {self.node}: {self.text} [{self.code}]"


class BuildAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it: `error` is None where the plan was written."""

    error: str | None
    faults: tuple[ParserFault, ...]
    version: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    layers: dict[str, int]
    types: dict[str, int]
    flags: tuple[str, ...]
    log: tuple[str, ...]
    seconds: float
    peak_memory_bytes: int | None
