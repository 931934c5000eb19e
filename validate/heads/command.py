"""`headport validate-heads`: heads beside the LM head, compared with PyTorch on texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from headport.bundle import Bundle
from headport.command import OptionRecord, Outcome, option, positional
from headport.errors import ParityError, UsageError
from headport.head_parts import parts_of
from headport.machine import usable_cpus
from headport.manifest import AdaptiveHead, Head, TaskHead, TasksHead, TreeHead, ValueHead
from headport.progress import track
from headport.providers import FALLBACK_HELP, PROVIDER_HELP, ProviderChoice
from headport.session import SessionSettings
from headport.validate.comparison import Material, check_ids, prepare
from headport.validate.documents import read_texts
from headport.validate.evidence import Record
from headport.validate.fitness import MERGED_FIRST, check_adapter, check_model, check_whole
from headport.validate.gates import recipe_name
from headport.validate.heads.candidate import HeadCandidate
from headport.validate.heads.figures import LIMITS, HeadFigures, HeadSums
from headport.validate.reference_process import ReferenceProcess
from headport.validate.report import ReferenceFacts
from headport.validate.sides import HeadsSide

__all__ = ["SUMMARY", "HeadsReport", "Options", "run", "validate_heads", "validate_heads_with"]

SUMMARY = "Compare heads that choose no next token with PyTorch on texts."

HEADS_SCHEMA_VERSION: Final = 1


class Options(OptionRecord, frozen=True):
    """Options of `headport validate-heads`."""

    bundle: Annotated[Path, positional("bundle folder, portable or lowered")]
    reference: Annotated[
        str, option("Hugging Face folder, .gguf or module:function", metavar="MODEL")
    ]
    text: Annotated[
        tuple[Path, ...], option("plain UTF-8 texts, or .jsonl files of records", metavar="FILE")
    ]
    head: Annotated[
        tuple[str, ...],
        option("as export was given it: NAME=FILE, or NAME=auto", metavar="NAME=SPEC"),
    ] = ()
    limit: Annotated[
        float | None,
        option("accepted share of the largest answer (default: by each head's number format)"),
    ] = None
    provider: Annotated[ProviderChoice, option(PROVIDER_HELP)] = "auto"
    cpu_fallback: Annotated[bool, option(FALLBACK_HELP)] = False
    trust_remote_code: Annotated[bool, option("as for export")] = False
    allow_pickle: Annotated[bool, option("as for export")] = False


class HeadsReport(Record, frozen=True):
    """The outcome, head by head."""

    schema_version: Literal[1]
    verdict: Literal["passed", "failed"]
    bundle: str
    checkpoint_sha256: str  # that the bundle was exported from
    target: str
    documents: int
    tokens: int
    heads: tuple[HeadFigures, ...]
    notes: tuple[str, ...]
    reference: ReferenceFacts

    def __bool__(self) -> bool:
        return self.verdict == "passed"


def validate_heads(options: Options) -> HeadsReport:
    """Compare every head but `lm` with the module it was made of.

    Raises:
        UsageError: If an option or a text is not usable, the bundle is pruned or has no such head,
            or a head's file was not given.
        BundleError: If the bundle is damaged.
        CheckpointError: If the reference or a head's file cannot be loaded.
        ParityError: If bundle and reference split a text into different tokens.
        ReferenceProcessError: If the reference process died.
    """
    if not options.text:
        raise UsageError("--text: at least one file expected, none given")
    if options.limit is not None and not 0 <= options.limit < float("inf"):
        raise UsageError(f"--limit: a share of 0 or more was expected, {options.limit:g} given")
    check_model(options.reference)
    read_texts(options.text)  # before anything is loaded
    threads = max(1, usable_cpus() // 2)
    flags = [f"--head={spec}" for spec in options.head]
    for name in ("trust_remote_code", "allow_pickle"):
        flags += [f"--{name.replace('_', '-')}"] if getattr(options, name) else []
    module = "headport.validate.heads.reference"
    with ReferenceProcess(options.reference, threads, *flags, module=module) as reference:
        return validate_heads_with(reference, options)


def validate_heads_with(reference: HeadsSide, options: Options) -> HeadsReport:
    """As `validate_heads`, with a reference that is already running.

    Args:
        reference: Holds the checkpoint and heads that `options` name; nothing asked.
        options: As for `validate_heads`.
    """
    bundle = Bundle.open(options.bundle)
    check_whole(bundle)
    threads = max(1, usable_cpus() // 2)
    settings = SessionSettings(threads, options.provider, options.cpu_fallback)
    candidate = HeadCandidate(bundle, settings)
    materials = prepare(read_texts(options.text), candidate, 0)
    _check_lengths(materials, candidate)
    facts = reference.ready().facts
    check_adapter(bundle, facts, None, MERGED_FIRST)
    _check_names(bundle, candidate, reference.ready().heads)
    _check_given(bundle, candidate, options.head)
    _check_labels(bundle, candidate, reference.ready().labels)
    check_ids(materials, candidate, reference)
    sums = _compare(materials, candidate, reference)
    figures = tuple(
        sums[name].figures(name, _KINDS[type(entry)], _recipe(bundle, name, entry), options.limit)
        for name, entry in candidate.entries.items()
    )
    documents = [document for material in materials for document in material.documents]
    return HeadsReport(
        schema_version=HEADS_SCHEMA_VERSION,
        verdict="passed" if all(f.verdict == "passed" for f in figures) else "failed",
        bundle=bundle.path.resolve().name,
        checkpoint_sha256=bundle.manifest.provenance.sha256,
        target=bundle.manifest.target,
        documents=len(documents),
        tokens=sum(len(document.token_ids) for document in documents),
        heads=figures,
        notes=_notes(bundle, facts),
        reference=facts,
    )


def _compare(
    materials: Sequence[Material], candidate: HeadCandidate, reference: HeadsSide
) -> dict[str, HeadSums]:
    sums = {name: HeadSums() for name in candidate.entries}
    documents = [document for material in materials for document in material.documents]
    for document in track(documents, "validate-heads", unit="text"):
        reference.ask_heads(document.token_ids)
        found = candidate.answers(document.token_ids)  # while the reference computes
        wanted = reference.read_heads()
        for name, each in sums.items():
            each.add(found[name], wanted[name])
    return sums


_KINDS: dict[type, str] = {
    ValueHead: "value",
    TasksHead: "tasks",
    Head: "vocabulary",
    AdaptiveHead: "adaptive",
    TreeHead: "tree",
}


def _recipe(bundle: Bundle, name: str, entry: Head | TaskHead) -> str:
    """The coarsest number format that an answer passes through: of any part of the head."""
    manifest = bundle.manifest
    parts = [entry] if isinstance(entry, Head) else list(parts_of(name, entry).values())
    names = [recipe_name(manifest.model, p, manifest.backbone_quantization) for p in parts]
    return max(names, key=list(LIMITS).index)


def _check_lengths(materials: Sequence[Material], candidate: HeadCandidate) -> None:
    for material in materials:
        for document in material.documents:
            if len(document.token_ids) > candidate.context:
                raise UsageError(
                    f"{material.text.file}, document {document.index}: "
                    f"{len(document.token_ids)} tokens, the context holds {candidate.context}; a "
                    "head is asked about whole texts, so cut it into several"
                )


def _check_names(bundle: Bundle, candidate: HeadCandidate, known: Sequence[str]) -> None:
    missing = [name for name in candidate.entries if name not in known]
    if missing:
        raise UsageError(
            f"{bundle.path}: head {missing[0]} is none of the reference's "
            f"({', '.join(known) or 'it has none'}); pass --head as export was given it, such as "
            f"--head {missing[0]}=FILE"
        )


def _check_given(bundle: Bundle, candidate: HeadCandidate, specs: Sequence[str]) -> None:
    """Refuse heads that were named and that the bundle lacks: nothing would be said of them."""
    names = [spec.partition("=")[0] for spec in specs]
    lost = [name for name in names if name not in candidate.entries]
    if lost:
        raise UsageError(
            f"--head {lost[0]}: {bundle.path} has no such head, it has "
            f"{', '.join(candidate.entries)}; export it with the head, or leave the option out"
        )


def _check_labels(
    bundle: Bundle, candidate: HeadCandidate, known: Mapping[str, Mapping[str, Sequence[str]]]
) -> None:
    """Scores that agree under exchanged names would answer otherwise."""
    for name, entry in candidate.entries.items():
        if not isinstance(entry, TasksHead):
            continue
        found = {task: list(each.labels) for task, each in entry.tasks.items()}
        expected = {task: list(names) for task, names in known.get(name, {}).items()}
        if found != expected:
            raise ParityError(
                f"{bundle.path}: head {name} names its scores {found}, the reference {expected}; "
                "export the bundle again from this checkpoint and head"
            )


def _notes(bundle: Bundle, facts: ReferenceFacts) -> tuple[str, ...]:
    provenance = bundle.manifest.provenance
    if facts.sha256 == provenance.sha256:
        return ()
    return (
        f"The reference {facts.checkpoint} is not the checkpoint this bundle was exported from "
        f"({provenance.checkpoint}).",
    )


def run(options: Options) -> Outcome:
    """Compare, and print a line per head; exit 0 passed, 1 failed."""
    report = validate_heads(options)
    lines = [
        f"{report.verdict.upper()}: {report.bundle} on {report.documents} texts, {report.tokens} "
        f"tokens, against {report.reference.checkpoint}"
    ]
    for found in report.heads:
        same = "" if found.same_best is None else f", same best {found.same_best:.3%}"
        lines.append(
            f"  {found.verdict:7} {found.head} ({found.kind}, {found.recipe}): max |Δ| "
            f"{found.max_abs_error:.2e}, {found.relative_error:.2e} of the largest answer, "
            f"{found.limit:g} accepted{same}; {found.answers} answers"
        )
    return Outcome("\n".join((*lines, *report.notes)), report, 0 if report else 1)
