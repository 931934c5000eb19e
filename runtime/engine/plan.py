"""One plan of one graph, and the record that tells what it is."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headport.bundle import Bundle, file_entry
from headport.engines import FOLDER, MERGED, RECORD_VERSION, EngineRecord, bundle_digest
from headport.errors import EngineError
from headport.manifest import Port
from headport.runtime.engine.options import Options
from headport.runtime.engine.profiles import Profile, shapes_of
from headport.runtime.engine.proof import check_proofs, prove_weights
from headport.runtime.engine.request import BuildAnswer, BuildRequest
from headport.runtime.engine.worker import build_apart

__all__ = ["Source", "build_recorded", "given_options"]

_MIB = 1 << 20
_FLAGS = {  # option → member of BuilderFlag
    "version_compatible": "VERSION_COMPATIBLE",
    "strip_weights": "STRIP_PLAN",
    "weight_streaming": "WEIGHT_STREAMING",
}


@dataclass(frozen=True)
class Source:
    """What a plan is built of."""

    graph: str  # name in the bundle, or `merged`
    file: Path
    inputs: tuple[Port, ...]


def build_recorded(
    bundle: Bundle,
    source: Source,
    *,
    profiles: tuple[Profile, ...],
    options: Options,
    scratch: Path,
) -> EngineRecord:
    """Build a plan into the bundle's folder, prove its weights, and write its record beside it.

    Raises:
        EngineError: If there is no plan, with what the parser or the builder says.
        ParityError: If it does not hold a head's integers as they are stored.
    """
    plan = bundle.path / FOLDER / f"{source.graph}.plan"
    cache = options.timing_cache
    request = BuildRequest(
        backend=options.backend,
        model=str(source.file),
        plan=str(plan),
        inputs=source.inputs,
        profiles=shapes_of(profiles, source.inputs),
        compute_capabilities=options.compute_capability,
        flags=tuple(flag for field, flag in _FLAGS.items() if getattr(options, field)),
        workspace_bytes=None if options.workspace is None else options.workspace * _MIB,
        timing_cache=None if cache is None else str(cache.absolute()),
    )
    memory = None if options.memory is None else options.memory * _MIB
    answer = build_apart(request, scratch, timeout_s=options.timeout, memory_bytes=memory)
    if answer.error is not None:
        raise EngineError(
            f"{source.graph}: {options.backend} {answer.version} builds no plan: {answer.error}; "
            "`headport lint BUNDLE --target tensorrt` names what it has no kernels for"
        )
    record = _record(bundle, source, request, answer, plan)
    record = msgspec.structs.replace(record, command=_command(options))
    if not options.strip_weights:
        proofs = prove_weights(bundle, source.graph, plan, merged=source.graph == MERGED)
        check_proofs(proofs)
        record = msgspec.structs.replace(record, weights=tuple(proofs))
    document = msgspec.json.format(msgspec.json.encode(record), indent=2)
    plan.with_name(f"{source.graph}.json").write_bytes(document + b"\n")
    return record


def _record(
    bundle: Bundle, source: Source, request: BuildRequest, answer: BuildAnswer, plan: Path
) -> EngineRecord:
    entry = file_entry(plan)
    return EngineRecord(
        schema_version=RECORD_VERSION,
        status="built",
        graph=source.graph,
        plan=f"{FOLDER}/{plan.name}",
        plan_sha256=entry.sha256,
        plan_bytes=entry.bytes,
        bundle_sha256=bundle_digest(bundle.manifest),
        graph_sha256=file_entry(source.file).sha256,
        checkpoint_sha256=bundle.manifest.provenance.sha256,
        backend=request.backend,
        backend_version=answer.version,
        compute_capabilities=request.compute_capabilities,
        flags=answer.flags,
        workspace_bytes=request.workspace_bytes,
        profiles=request.profiles,
        inputs=answer.inputs,
        outputs=answer.outputs,
        layers=answer.layers,
        types=answer.types,
        weights=(),
        log=answer.log,
        seconds=answer.seconds,
        peak_memory_bytes=answer.peak_memory_bytes,
        command="",
    )


def _command(options: Options) -> str:
    """The command line that builds it again, from the bundle's own name."""
    source, output = options.bundle.name, options.output.name
    # What src/headport/build.py builds plans of is removed; their own bundle holds it as well.
    if options.bundle.absolute().parent.name.startswith(".build."):
        source, output = output, f"{output}.again"
    words = ["headport", "engine", source, "-o", output]
    for name, value in given_options(options).items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, tuple):
            words += [flag, *map(str, value)]
        else:
            words += [flag, value.name if isinstance(value, Path) else str(value)]
    return shlex.join(words)


def given_options(options: Options) -> dict[str, Any]:
    """What was given, without the folders."""
    defaults = {f.name: f.default for f in msgspec.structs.fields(options)}
    names = [n for n in options.__struct_fields__ if n not in ("bundle", "output", "force")]
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value != defaults[name]}
