"""`headport analyse`: terms, ends, loops and certainty of a bundle beside its reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from headport.bundle import Bundle, check_text_files, write_text
from headport.command import OptionRecord, Outcome, check_least, option, positional
from headport.errors import UsageError
from headport.machine import usable_cpus
from headport.validate.analysis.certainty import CertaintyOfSides
from headport.validate.analysis.ends import EndProbabilities, end_ids
from headport.validate.analysis.lens import LENS_TOKENS, look
from headport.validate.analysis.loops import loops
from headport.validate.analysis.records import ANALYSIS_SCHEMA_VERSION, AnalysisReport, Lens
from headport.validate.analysis.tables import render_lines, render_markdown, render_page
from headport.validate.analysis.terms import Watch, read_terms
from headport.validate.candidate import Candidate
from headport.validate.comparison import Job, check_ids, jobs_of, prepare
from headport.validate.documents import read_texts
from headport.validate.facts import candidate_facts
from headport.validate.fitness import MERGED_FIRST, check_adapter, check_model
from headport.validate.reference_process import ReferenceProcess
from headport.validate.sides import ReferenceSide
from headport.validate.store import is_store
from headport.validate.worst import shorten

__all__ = ["SUMMARY", "Options", "analyse", "analyse_with", "run"]

SUMMARY = "Show what logits say about watched terms, ends of text, loops and certainty."

_CONTEXT_TOKENS = 24
_TRUST = ("trust_remote_code", "allow_pickle")


class Options(OptionRecord, frozen=True):
    """Options of `headport analyse`."""

    bundle: Annotated[Path, positional("bundle folder, portable or lowered, not pruned")]
    reference: Annotated[
        str, option("Hugging Face folder, .gguf or module:function", metavar="MODEL")
    ]
    text: Annotated[tuple[Path, ...], option("UTF-8 texts or .jsonl", metavar="FILE")]
    watch: Annotated[Path | None, option("terms to watch, one a line; # begins a comment")] = None
    max_tokens: Annotated[int, option("positions in all, an equal share of each text; 0: all")] = (
        4096
    )
    window: Annotated[int, option("tokens fed at once at most; the context bounds it too")] = 1024
    greedy_tokens: Annotated[
        int, option("new tokens of each greedy run that is searched for loops, 0 for none")
    ] = 96
    lens: Annotated[
        int,
        option(
            f"positions, to {LENS_TOKENS}, at which every layer of the reference is read through "
            "its head; 0 for none"
        ),
    ] = 0
    markdown: Annotated[Path | None, option("also write the analysis as Markdown")] = None
    html: Annotated[Path | None, option("also write the analysis as one HTML page")] = None
    force: Annotated[bool, option("replace existing --markdown and --html files")] = False
    trust_remote_code: Annotated[bool, option("as for export")] = False
    allow_pickle: Annotated[bool, option("as for export")] = False


def analyse(options: Options) -> AnalysisReport:
    """Look at both sides' logits on texts.

    Raises:
        UsageError: If an option or a file is not usable, or the reference is another model.
        BundleError: If the bundle is damaged.
        CheckpointError: If the reference cannot be loaded.
        OutputError: If an output exists and `force` is False.
        ParityError: If bundle and reference split a text into different tokens.
        ReferenceProcessError: If the reference process died.
    """
    _check(options)
    flags = [f"--{n.replace('_', '-')}" for n in _TRUST if getattr(options, n)]
    threads = max(1, usable_cpus() - max(1, usable_cpus() // 2))
    with ReferenceProcess(options.reference, threads, *flags) as reference:
        return analyse_with(reference, options)


def analyse_with(reference: ReferenceSide, options: Options) -> AnalysisReport:
    """As `analyse`, with a reference that is already running and may serve again."""
    _check(options)
    terms = () if options.watch is None else read_terms(options.watch)
    texts = read_texts(options.text)
    bundle = Bundle.open(options.bundle)
    bundle.require_decoder_only(
        "an analysis against its reference", "compare it with `headport validate`"
    )
    bundle.require_no_prefix(
        "an analysis, whose reference takes no adapter", "use `headport validate --adapter`"
    )
    candidate = Candidate(bundle, max(1, usable_cpus() // 2))
    materials = prepare(texts, candidate, options.max_tokens)
    facts = reference.ready().facts
    check_adapter(bundle, facts, None, MERGED_FIRST)
    if facts.vocab_size != candidate.vocab_size:
        raise UsageError(
            f"logits over the same vocabulary expected, the reference gives {facts.vocab_size} and "
            f"{bundle.path} {candidate.vocab_size}; pass the checkpoint it was exported from, and "
            "of a pruned bundle the one before pruning"
        )
    check_ids(materials, candidate, reference)
    window = min(options.window, candidate.context)
    watch = Watch(terms, lambda text: candidate.tokens.encode(text, add_special_tokens=False))
    certainty = CertaintyOfSides()
    ids = end_ids(bundle, candidate.tokens)
    ends = EndProbabilities(ids)
    jobs = list(jobs_of(materials, window))
    positions = 0
    for number, job in enumerate(jobs):
        reference.ask_score(job.window.token_ids)
        states = candidate.hidden_states([job.window.token_ids])[0]
        for block in reference.read_score(candidate.block_rows):
            rows = slice(block.start, block.start + len(block.logits))
            logits = block.logits, candidate.logits(states[rows])
            watch.add(number, block.start, logits)
            certainty.add(logits)
            targets = job.window.targets[rows]
            ends.add(logits, ~(targets[:, None] == list(ids)).any(axis=1))
            positions += len(block.logits)

    def context(place: tuple[int, int]) -> str:
        job, at = jobs[place[0]], place[1]
        before = job.window.token_ids[max(0, at + 1 - _CONTEXT_TOKENS) : at + 1]
        return shorten(candidate.tokens.decode(before.tolist()))

    prompts, found = loops(materials, candidate, reference, options.greedy_tokens)
    own = candidate_facts(bundle, candidate)
    return AnalysisReport(
        schema_version=ANALYSIS_SCHEMA_VERSION,
        bundle=own.bundle,
        manifest_sha256=own.manifest_sha256,
        reference=facts.checkpoint,
        reference_sha256=facts.sha256,
        texts=tuple(text.name for text in texts),
        tokens=positions,
        terms=watch.terms(lambda token_id: candidate.tokens.decode([token_id]), context),
        ends=ends.ends(materials, candidate, reference, window) if ids else None,
        prompts=prompts,
        loops=found,
        certainty=certainty.certainty(),
        lens=_lens(reference, jobs, options.lens, candidate) if options.lens else None,
    )


def _lens(reference: ReferenceSide, jobs: Sequence[Job], shown: int, candidate: Candidate) -> Lens:
    def spell(token_id: int) -> str:
        return candidate.tokens.decode([token_id]) or candidate.tokens.piece(token_id)

    return look(reference, jobs[0].window.token_ids.tolist(), shown, spell)


def _check(options: Options) -> None:
    check_least(options, {"max_tokens": 0, "window": 1, "greedy_tokens": 0, "lens": 0})
    if options.lens > LENS_TOKENS:
        raise UsageError(f"--lens: at most {LENS_TOKENS} expected, {options.lens} given")
    if not options.text:
        raise UsageError("--text: at least one file expected, none given")
    if is_store(options.reference):
        raise UsageError(
            f"--reference {options.reference}: a model was expected; a stored reference knows only "
            "its own windows, not the ends of documents"
        )
    check_model(options.reference)
    check_text_files((options.markdown, options.html), force=options.force)


def run(options: Options) -> Outcome:
    """Analyse, and write what was asked for."""
    report = analyse(options)
    pages = ((options.markdown, render_markdown), (options.html, render_page))
    files = {path: render(report) for path, render in pages if path is not None}
    write_text(files, force=options.force)
    return Outcome(render_lines(report), report)
