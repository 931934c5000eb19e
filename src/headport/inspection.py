"""`headport inspect`: what a bundle is, how large, where from, and whether it is intact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headport.bundle import Bundle
from headport.command import OptionRecord, Outcome, option, positional
from headport.condition import open_conditions
from headport.engines import (
    EngineRecord,
    installed_backend,
    read_engines,
    rebuild_advice,
    strangers,
    unusable,
)
from headport.errors import BundleError
from headport.given_rows import embedding_size
from headport.gpu_probe import probe_gpu
from headport.head_lines import stored_as, task_head_lines
from headport.manifest import (
    BackboneQuantization,
    Head,
    License,
    Manifest,
    Model,
    Prefix,
    Provenance,
    Source,
    TaskHead,
    Tuning,
    Vocabulary,
)
from headport.memory import MemoryUse, measure_memory
from headport.providers import FALLBACK_HELP, PROVIDER_HELP, ProviderChoice
from headport.selftest import SelftestResult, run_selftest
from headport.session import SessionSettings
from headport.tuned import applies_here, machine_text, threads_text

__all__ = ["SUMMARY", "Description", "Options", "describe", "inspect", "run"]

SUMMARY = "Say what a bundle is and whether it is intact."


class Options(OptionRecord, frozen=True):
    """Options of `headport inspect`."""

    bundle: Annotated[Path, positional("bundle folder")]
    selftest: Annotated[
        bool, option("also run the stored self-test on this machine; exit 1 if it fails")
    ] = False
    memory: Annotated[
        bool, option("also load it in a process of its own and measure the memory it takes")
    ] = False
    provider: Annotated[ProviderChoice, option(PROVIDER_HELP)] = "auto"
    cpu_fallback: Annotated[bool, option(FALLBACK_HELP)] = False


class ConditionFacts(msgspec.Struct, frozen=True):
    """What a bundle's conditions are."""

    size: int  # values of one
    names: tuple[str, ...]  # of those that are stored


class TunedFacts(msgspec.Struct, frozen=True):
    """One record of `headport tune`."""

    record: Tuning
    here: bool  # this machine is of the kind that it was measured on

    def text(self) -> str:
        """As one line."""
        record = self.record
        return (
            f"{threads_text(record.threads, record.spinning)}, measured with ONNX Runtime "
            f"{record.onnxruntime} on {machine_text(record.cpus, record.cpu)}, "
            f"which is {'' if self.here else 'not '}this machine"
        )


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What `inspect` reports."""

    bundle: str
    target: str
    model: Model
    vocabulary: Vocabulary
    heads: dict[str, Head]
    task_heads: dict[str, TaskHead]
    graph_bytes: dict[str, int]  # bytes of the tensors each graph reads; shared ones count in each
    tensor_bytes: int  # bytes of the tensors on disk, each once
    total_bytes: int
    license: License
    provenance: Provenance
    session_options: dict[str, str]
    checksums: str
    unlisted_files: tuple[str, ...]
    selftest: dict[str, Any] | None = None
    memory: MemoryUse | None = None
    backbone_quantization: BackboneQuantization | None = None
    source: Source | None = None  # of an encoder-decoder model
    conditions: ConditionFacts | None = None  # that hidden states may be told
    prefix: Prefix | None = None  # what every sequence begins with
    tuned: tuple[TunedFacts, ...] = ()
    embedding_size: int | None = None  # numbers of a row of embeddings that prompts may hold
    engines: tuple[EngineRecord, ...] = ()
    engine_faults: dict[str, tuple[str, ...]] = {}  # plan → why it is not this bundle's
    engine_notes: dict[str, tuple[str, ...]] = {}  # plan → why it cannot be run on this machine

    def text(self) -> str:
        """The description as lines for a terminal."""
        model, vocabulary = self.model, self.vocabulary
        kept = f", {vocabulary.kept_size} kept" if vocabulary.kept_size else ""
        kept += ", renumbered from the checkpoint's" if vocabulary.checkpoint_ids else ""
        rows = [
            ("bundle", f"{self.bundle} ({_size(self.total_bytes)}, target {self.target})"),
            (
                "model",
                f"{model.architecture}, {model.layers} layers, hidden {model.hidden_size}, "
                f"context {model.max_context}, {model.dtype}",
            ),
            *(("encoder", line) for line in _source(self.source)),
            ("vocabulary", f"{vocabulary.size} of {vocabulary.padded_size} rows{kept}"),
            *((f"head {name}", _head(head)) for name, head in self.heads.items()),
            *(
                (f"head {name}", line)
                for name, head in self.task_heads.items()
                for line in task_head_lines(name, head)
            ),
            *(("prefix", line) for line in _prefix(self.prefix)),
            *(("prompts", line) for line in _prompts(self.embedding_size)),
            *(("condition", line) for line in _condition(self.conditions)),
            *(("backbone", line) for line in _backbone(self.backbone_quantization)),
            *((f"graph {name}", _size(size)) for name, size in self.graph_bytes.items()),
            ("licence", f"{self.license.id or 'not stated'} ({self.license.source})"),
            (
                "checkpoint",
                f"{self.provenance.checkpoint} ({self.provenance.format}, "
                f"sha256 {self.provenance.sha256[:16]}…)",
            ),
            *(("stage", _stage(stage)) for stage in self.provenance.stages),
            *(("engine", line) for line in self._engine_lines()),
            *(("session", f"{key} = {value}") for key, value in self.session_options.items()),
            *(("threads", each.text()) for each in self.tuned),
            ("checksums", self.checksums),
            *(("unlisted", f"{name} (not part of the bundle)") for name in self.unlisted_files),
        ]
        if self.selftest is not None:
            rows.append(("self-test", self.selftest["text"]))
        if self.memory is not None:
            rows.append(("memory", _memory(self.memory)))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _engine_lines(self) -> Iterator[str]:
        for record in self.engines:
            yield _engine(record)
            yield _chain(record)
            for fault in self.engine_faults.get(record.plan, ()):
                yield f"FAULT: {fault}; build it again: {record.command}"
            for note in self.engine_notes.get(record.plan, ()):
                yield f"not on this machine: {note}"


def _engine(record: EngineRecord) -> str:
    targets = ", ".join(record.compute_capabilities) or "the backend's own GPUs"
    weights = "".join(
        f", {w.plan_bytes_per_element:.3f} bytes per weight of {w.weight} "
        f"({'its bytes found' if w.found else 'its bytes not found as stored'})"
        for w in record.weights
    )
    return (
        f"{record.plan} ({_size(record.plan_bytes)}): {record.status}, not validated, by "
        f"{record.backend} {record.backend_version} for {targets}{weights}"
    )


def _chain(record: EngineRecord) -> str:
    return (
        f"checkpoint {record.checkpoint_sha256[:16]}… → {record.graph} ONNX "
        f"{record.graph_sha256[:16]}… → plan {record.plan_sha256[:16]}…"
    )


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _memory(use: MemoryUse) -> str:
    return (
        f"{_size(use.total)} resident after one token, of which {_size(use.private)} private: "
        f"backbone {_size(use.backbone)}, heads {_size(use.heads)}, first run "
        f"{_size(use.first_run)} (measured)"
    )


def _head(head: Head) -> str:
    parts = [f"[{head.vocab_size}, hidden] {head.outputs}", stored_as(head)]
    parts += [f"after the graph {head.transform}"] if head.transform else []
    parts.append("tied to the embedding" if head.tied else "untied")
    if head.candidates is not None:
        parts[0] = f"[{head.vocab_size}, hidden] → {head.candidates.count} candidates"
        bound = (
            f"certified per {head.candidates.bound}" if head.candidates.certified else "rescored"
        )
        parts.append(f"{bound} with the original weight, all logits by {head.candidates.full}")
    parts += [f"scale {head.scale:g}"] if head.scale != 1 else []
    parts += ["bias"] if head.bias else []
    parts += [f"softcap {head.softcap:g}"] if head.softcap else []
    return ", ".join(parts)


def _backbone(record: BackboneQuantization | None) -> list[str]:
    """How the backbone's weights are stored, as one line if any is in fewer bits."""
    if record is None:
        return []
    parts = []
    for kind, weights in (("matrices", record.matrices), ("embedding", record.embedding)):
        count = Counter(
            (
                how.format + (f" block {how.block}" if how.block else ""),
                f" with {how.activations} activations" if how.activations else "",
            )
            for how in weights.values()
        )
        parts += [f"{number} × {form} {kind}{own}" for (form, own), number in count.items()]
    return [f"{', '.join(parts)}, activations {record.activations} once lowered"]


def _source(source: Source | None) -> list[str]:
    """What the encoder reads for the decoder, which is the backbone, as one line."""
    if source is None:
        return []
    if source.vocab_size is None:
        return ["reads features; its cross keys and values are read by the backbone, a decoder"]
    most = "any number of" if source.max_length is None else f"up to {source.max_length}"
    return [f"reads {most} tokens; its cross keys and values are read by the backbone, a decoder"]


def _prefix(found: Prefix | None) -> list[str]:
    """What stands in the caches before a sequence, as one line."""
    if found is None:
        return []
    return [
        f"{found.tokens} learnt tokens ({found.kind}) before every sequence, in its caches from "
        f"the start; they take {found.tokens} places more than the context"
    ]


def _prompts(size: int | None) -> list[str]:
    """What a prompt may hold beside tokens, as one line."""
    return [] if size is None else [f"tokens, and rows of {size} numbers in their place"]


def _condition(found: ConditionFacts | None) -> list[str]:
    """What may be added to hidden states before the head, as one line."""
    if found is None:
        return []
    stored = f"stored: {', '.join(found.names)}" if found.names else "none stored"
    return [f"{found.size} values, projected and added to hidden states before the head; {stored}"]


def _conditions(bundle: Bundle) -> ConditionFacts | None:
    found = open_conditions(bundle)
    return None if found is None else ConditionFacts(found.size, found.names)


def _stage(stage: Any) -> str:
    given = ", ".join(f"{key}={value}" for key, value in stage.options.items())
    return f"{stage.stage} ({given})"


def _graph_bytes(manifest: Manifest) -> dict[str, int]:
    found = dict.fromkeys(manifest.graphs, 0)
    for tensor in manifest.tensors:
        for graph in {consumer.split(":", 1)[0] for consumer in tensor.consumers}:
            found[graph] += tensor.length
    return found


def describe(bundle: Bundle, selftest: SelftestResult | None = None) -> Description:
    """Describe an opened, and so verified, bundle."""
    manifest = bundle.manifest
    engines = tuple(read_engines(bundle).values())
    return Description(
        bundle=bundle.path.name,
        target=manifest.target,
        model=manifest.model,
        vocabulary=manifest.vocabulary,
        heads=manifest.heads,
        task_heads=manifest.task_heads,
        graph_bytes=_graph_bytes(manifest),
        tensor_bytes=sum(tensor.length for tensor in manifest.tensors),
        total_bytes=sum(entry.bytes for entry in manifest.files.values()),
        license=manifest.license,
        provenance=manifest.provenance,
        session_options=manifest.session_options,
        checksums=f"{len(manifest.files)} files verified",
        unlisted_files=tuple(bundle.unlisted_files()),
        selftest=None if selftest is None else _selftest(selftest),
        backbone_quantization=manifest.backbone_quantization,
        source=manifest.source,
        conditions=_conditions(bundle),
        prefix=manifest.prefix,
        tuned=tuple(TunedFacts(each, applies_here(each)) for each in manifest.tuned),
        embedding_size=embedding_size(manifest),
        engines=engines,
        engine_faults={e.plan: tuple(f) for e in engines if (f := strangers(bundle, e))},
        engine_notes={
            e.plan: tuple(unusable(e, probe_gpu(), installed_backend(e.backend))) for e in engines
        },
    )


def _selftest(result: SelftestResult) -> dict[str, Any]:
    heads = ", ".join(f"{name} {error:.2e}" for name, error in result.logits_error.items())
    accepted = result.tolerance
    others = "".join(
        f"; head {name} max |Δ| {error:.2e} (accepted {accepted.task_heads[name]:.2e})"
        for name, error in result.task_heads_error.items()
    )
    logits = f", logits max |Δ| {heads} (accepted {accepted.logits:.2e})" if heads else ""
    certificates = "".join(
        f"; head {name}: {check.text()}" for name, check in result.certificates.items()
    )
    return {
        "passed": bool(result),
        "certificates": {name: asdict(check) for name, check in result.certificates.items()},
        "hidden_states_error": result.hidden_states_error,
        "logits_error": result.logits_error,
        "task_heads_error": result.task_heads_error,
        "tolerance": accepted,
        "text": (
            f"{'passed' if result else 'FAILED'}: hidden states max |Δ| "
            f"{result.hidden_states_error:.2e} (accepted {accepted.hidden_states:.2e})"
            f"{logits}{others}{certificates}"
        ),
    }


def inspect(options: Options) -> tuple[Description, bool]:
    """Open, verify and describe a bundle; the flag says whether all that was looked at is right.

    Raises:
        BundleError: If the bundle is damaged, naming every fault.
    """
    try:
        bundle = Bundle.open(options.bundle)
    except BundleError as error:
        raise BundleError(f"{error}{rebuild_advice(options.bundle)}") from error
    settings = SessionSettings(provider=options.provider, cpu_fallback=options.cpu_fallback)
    result = run_selftest(bundle, settings) if options.selftest else None
    found = describe(bundle, result)
    if options.memory:
        found = msgspec.structs.replace(found, memory=measure_memory(options.bundle))
    return found, not found.engine_faults and (result is None or bool(result))


def run(options: Options) -> Outcome:
    """Inspect and print."""
    description, passed = inspect(options)
    return Outcome(description.text(), description, 0 if passed else 1)
