"""`headport validate`: a bundle compared with its PyTorch reference, and a verdict."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headport.bundle import Bundle, check_text_files, write_text
from headport.command import Outcome, check_least
from headport.errors import UsageError
from headport.machine import usable_cpus
from headport.session import SessionSettings
from headport.validate.assembly import Evidence, Findings, Settings, assemble_report
from headport.validate.attribution import attribute, noise_floor, sampled_jobs
from headport.validate.bisection import MAX_WINDOWS, bisect, find_stages
from headport.validate.candidate import Candidate
from headport.validate.comparison import Material, check_ids, compare, jobs_of, prepare
from headport.validate.documents import Text, read_texts
from headport.validate.fitness import (
    check_adapter,
    check_conditioned,
    check_kind,
    check_known,
    check_model,
    check_sourced,
    check_whole,
    knows_top_only,
    midpoint_of,
    name_condition,
    read_condition,
)
from headport.validate.gates import GateRule, check_slices, read_gates
from headport.validate.greedy import run_greedy
from headport.validate.markdown import render_markdown
from headport.validate.options import Options
from headport.validate.pairs import check_targets
from headport.validate.reading import read_report
from headport.validate.reference_process import (
    ADAPTER_FLAG,
    CONDITION_FLAG,
    PROJECTION_FLAG,
    SOURCED_FLAG,
    ReferenceProcess,
)
from headport.validate.report import ReferenceFacts, Report
from headport.validate.sampler_parity import sampler_parity
from headport.validate.sides import ReferenceSide
from headport.validate.store import PREFIX_TOKENS, StoredReference, is_store
from headport.validate.terminal import render_terminal
from headport.validate.top_rows import BOUNDED_METRICS
from headport.validate.views.github import append_summary, workflow_commands
from headport.validate.views.junit import render_junit
from headport.validate.views.page import render_page

__all__ = ["SUMMARY", "Options", "run", "validate", "validate_with"]

SUMMARY = "Compare a bundle with its PyTorch reference on texts, and decide by gates."


_TRUST = ("trust_remote_code", "allow_pickle")


def validate(options: Options) -> Report:
    """Compare a bundle with its reference.

    Raises:
        UsageError: If an option, a text or the gates file is not usable, or the reference is
            another model.
        BundleError: If the bundle is damaged.
        CheckpointError: If the reference cannot be loaded.
        OutputError: If an output exists and `force` is False.
        ParityError: If bundle and reference split a text into different tokens.
        NonFiniteError: If a logit is NaN or infinite.
        ReferenceProcessError: If the reference process died.
    """
    if is_store(options.reference):
        stored = StoredReference(options.reference)
        return _validate(_read_task(options, stored), stored)
    task = _read_task(options)
    cpus = usable_cpus()
    flags = [f"--{n.replace('_', '-')}" for n in _TRUST if getattr(options, n)]
    flags += [] if options.adapter is None else [f"{ADAPTER_FLAG}{options.adapter}"]
    flags += [] if task.bundle.manifest.source is None else [SOURCED_FLAG]
    if options.condition is not None:
        flags += [f"{PROJECTION_FLAG}{options.projection}", f"{CONDITION_FLAG}{options.condition}"]
    threads = cpus - _candidate_threads(cpus)
    with ReferenceProcess(options.reference, threads, *flags) as reference:
        return _validate(task, reference)


def validate_with(reference: ReferenceSide, options: Options) -> Report:
    """As `validate`, with a reference that is already running and may serve again.

    Args:
        reference: Runs the checkpoint `options.reference`; nothing asked.
        options: As for `validate`.
    """
    return _validate(_read_task(options), reference)


@dataclass(frozen=True)
class _Task:
    """Options whose files have been read and found in order."""

    options: Options
    rules: tuple[GateRule, ...] | None
    texts: list[Text]
    bundle: Bundle
    midpoint: Bundle | None
    baseline: tuple[Path, Report] | None


def _read_task(options: Options, stored: StoredReference | None = None) -> _Task:
    _check(options)
    if stored is not None:
        options = _as_stored(options, stored)
    rules = read_gates(options.gates) if options.gates else None
    texts = read_texts(options.text) if stored is None else stored.texts()
    check_slices(rules or (), [text.name for text in texts])
    if stored is not None and knows_top_only(stored):
        check_known(options.gates, rules or (), options.baseline, stored)
    bundle = _whole(options.bundle)
    asked = {"--bisect": options.bisect, "--overlap": options.overlap > 0}
    check_conditioned(bundle, options.condition, options.projection)
    check_sourced(bundle, [name for name, given in asked.items() if given], stored)
    if options.bisect and options.condition is not None:
        raise UsageError("--bisect: a condition changes no state between layers; leave it out")
    if options.bisect:
        find_stages(bundle)  # before anything is run
    return _Task(
        options=options,
        rules=rules,
        texts=texts,
        bundle=bundle,
        midpoint=None if options.unquantised is None else midpoint_of(options.unquantised, bundle),
        baseline=(
            None if options.baseline is None else (options.baseline, read_report(options.baseline))
        ),
    )


def _whole(path: Path) -> Bundle:
    """Open a bundle that gives logits of the whole vocabulary.

    Raises:
        UsageError: If it was pruned.
    """
    bundle = Bundle.open(path)
    check_whole(bundle)
    return bundle


_NEEDS_THE_MODEL = {
    "condition": "it holds what the model said without one",
    "sampler": "samplers are held against transformers itself",
    "bisect": "states between layers are not stored",
}


def _as_stored(options: Options, stored: StoredReference) -> Options:
    """The options with those of the store, which nobody may contradict."""
    if options.adapter is not None:
        raise UsageError(
            f"--adapter: {stored.path} holds what the model said; give the adapter to "
            "`headport reference`, which wrote it, and leave it out here"
        )
    if options.text:
        raise UsageError(f"--text: {stored.path} brings its own texts; leave the option out")
    for name, reason in _NEEDS_THE_MODEL.items():
        if getattr(options, name):
            raise UsageError(
                f"--{name}: {reason}; pass the checkpoint instead of the stored reference "
                f"{stored.path}"
            )
    store = stored.store
    fixed: dict[str, Any] = {
        "window": store.window,
        "overlap": store.overlap,
        "max_tokens": store.max_tokens,
        "ignore_ids": store.ignored_ids,
    }
    usual = {f.name: f.default for f in msgspec.structs.fields(Options)}
    for name, value in fixed.items():
        given = getattr(options, name)
        if given not in (usual[name], value):
            flag = name.replace("_", "-")
            raise UsageError(
                f"--{flag}: {stored.path} was written with {value}, {given} given; leave the "
                "option out or write the store again"
            )
    return msgspec.structs.replace(options, **fixed)


def _candidate_threads(cpus: int) -> int:
    # Both sides compute at the same time, and threads beyond the CPUs would only spin.
    return max(1, cpus // 2)


def _validate(task: _Task, reference: ReferenceSide) -> Report:
    options = task.options
    chosen = SessionSettings(provider=options.provider, cpu_fallback=options.cpu_fallback)
    condition = read_condition(options.condition)
    candidate = Candidate(task.bundle, _candidate_threads(usable_cpus()), chosen, condition)
    sources = candidate.sources
    materials = prepare(task.texts, candidate, options.max_tokens, options.ignore_ids, sources)
    ready = reference.ready()
    check_kind(task.bundle, ready, sources)
    _check_vocabulary(ready.facts, candidate)
    stored = isinstance(reference, StoredReference)
    remedy = "write the store again, with --adapter" if stored else "pass --adapter FOLDER"
    check_adapter(task.bundle, ready.facts, options.adapter, remedy)
    check_ids(materials, candidate, reference)
    window = min(options.window, candidate.context)
    if options.overlap >= window:
        raise UsageError(f"--overlap: less than the window of {window} tokens expected")
    for material in materials if sources is not None else ():
        check_targets(material.text, material.documents, window)
    comparison = compare(
        materials,
        candidate,
        reference,
        window=window,
        overlap=options.overlap,
        batch_size=options.batch_size,
    )
    started = time.perf_counter()
    greedy = run_greedy(materials, candidate, reference, options.greedy_tokens)
    seconds = time.perf_counter() - started
    evidence = _evidence(task, materials, candidate, reference, window)
    settings = Settings(
        window=window,
        overlap=options.overlap,
        batch_size=options.batch_size,
        max_tokens=options.max_tokens,
        greedy_tokens=options.greedy_tokens,
        ignored_ids=options.ignore_ids,
        rules=task.rules,
        rules_source=options.gates.name if options.gates else None,
        baseline=task.baseline,
        bounded=BOUNDED_METRICS if knows_top_only(reference) else (),
        condition=name_condition(options.condition, condition),
        start=None if sources is None else candidate.tokens.piece(sources.start_token),
    )
    found = Findings(materials, comparison, greedy, seconds, ready, evidence)
    return assemble_report(task.bundle, candidate, found, settings)


def _evidence(
    task: _Task,
    materials: Sequence[Material],
    candidate: Candidate,
    reference: ReferenceSide,
    window: int,
) -> Evidence:
    """What explains the figures, on a sample of the windows."""
    options, started = task.options, time.perf_counter()
    midpoint = None
    if task.midpoint is not None:
        chosen, condition = candidate.settings, read_condition(options.condition)
        midpoint = Candidate(task.midpoint, chosen.threads, chosen, condition)
    attribution = bisection = floor = sampler = None
    if options.attribution_tokens:
        jobs = sampled_jobs(materials, window, options.overlap, options.attribution_tokens)
        attribution = attribute(jobs, candidate, reference, midpoint)
    if options.bisect:
        jobs = sampled_jobs(materials, window, options.overlap, MAX_WINDOWS * PREFIX_TOKENS)
        bisection = bisect(jobs, task.bundle, candidate.settings, reference)
    if isinstance(reference, StoredReference):
        floor = reference.store.noise_floor
    elif options.noise_floor_tokens:
        jobs = sampled_jobs(materials, window, options.overlap, options.noise_floor_tokens)
        floor = noise_floor(jobs, reference, candidate.block_rows)
    if options.sampler:
        jobs = list(jobs_of(materials, window, options.overlap))
        sampler = sampler_parity(jobs, reference)
    seconds = time.perf_counter() - started
    return Evidence(attribution, bisection, floor, sampler, seconds=seconds)


def _outputs(options: Options) -> tuple[Path | None, Path | None, Path | None]:
    return options.markdown, options.html, options.junit


_LEAST = {
    "max_tokens": 0,
    "window": 1,
    "batch_size": 1,
    "overlap": 0,
    "greedy_tokens": 0,
    "attribution_tokens": 0,
    "noise_floor_tokens": 0,
}


def _check(options: Options) -> None:
    check_least(options, _LEAST)
    if not options.text and not is_store(options.reference):
        raise UsageError("--text: at least one file expected, none given")
    if 0 < options.max_tokens < len(options.text):
        raise UsageError(
            f"--max-tokens {options.max_tokens} leaves nothing for some of the "
            f"{len(options.text)} texts; give at least one token for each"
        )
    check_text_files(_outputs(options), force=options.force)
    check_model(options.reference)


def _check_vocabulary(reference: ReferenceFacts, candidate: Candidate) -> None:
    if reference.vocab_size != candidate.vocab_size:
        raise UsageError(
            f"logits over the same vocabulary expected, the reference {reference.checkpoint} "
            f"gives {reference.vocab_size} and the bundle {candidate.vocab_size}; "
            "pass the checkpoint that the bundle was exported from"
        )


def run(options: Options) -> Outcome:
    """Validate, write what was asked for; exit 0 passed, 1 failed or undecided."""
    report = validate(options)
    renderers = (render_markdown, render_page, render_junit)
    pages = zip(_outputs(options), renderers, strict=True)
    files = {path: render(report) for path, render in pages if path is not None}
    write_text(files, force=options.force)
    text = render_terminal(report)
    if append_summary(report):
        text = "\n".join(filter(None, (text, workflow_commands(report))))
    return Outcome(text, report, 0 if report else 1)
