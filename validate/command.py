"""`headport validate`: a bundle compared with its PyTorch reference, and a verdict."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from headport.bundle import Bundle, write_text
from headport.command import OptionRecord, Outcome, option, positional
from headport.errors import CheckpointError, OutputError, UsageError
from headport.providers import FALLBACK_HELP, PROVIDER_HELP, ProviderChoice
from headport.session import SessionSettings, usable_cpus
from headport.validate.assembly import Findings, Settings, assemble_report
from headport.validate.candidate import Candidate
from headport.validate.comparison import check_ids, compare, prepare
from headport.validate.documents import Text, read_texts
from headport.validate.gates import GateRule, check_slices, read_gates
from headport.validate.greedy import run_greedy
from headport.validate.markdown import render_markdown
from headport.validate.reference_process import ReferenceProcess
from headport.validate.report import ReferenceFacts, Report
from headport.validate.terminal import render_terminal
from headport.validate.webpage import render_webpage

__all__ = ["SUMMARY", "Options", "run", "validate", "validate_with"]

SUMMARY = "Compare a bundle with its PyTorch reference on texts, and decide by gates."


class Options(OptionRecord, frozen=True):
    """Options of `headport validate`."""

    bundle: Annotated[Path, positional("bundle folder, portable or lowered")]
    reference: Annotated[
        str, option("checkpoint to compare with: Hugging Face folder or .gguf", metavar="MODEL")
    ]
    text: Annotated[
        tuple[Path, ...], option("plain UTF-8 texts, each reported by name", metavar="FILE")
    ]
    gates: Annotated[
        Path | None, option("limits that decide (TOML; default: those of the recipe)")
    ] = None
    markdown: Annotated[Path | None, option("also write the report as Markdown")] = None
    html: Annotated[Path | None, option("also write the report as one HTML page")] = None
    force: Annotated[bool, option("replace existing --markdown and --html files")] = False
    max_tokens: Annotated[
        int, option("tokens to score in all, an equal share of each text (default: 0, all)")
    ] = 0
    window: Annotated[int, option("tokens fed at once at most; the context bounds it too")] = 1024
    batch_size: Annotated[int, option("windows that the bundle runs together")] = 1
    greedy_tokens: Annotated[int, option("new tokens of each greedy run, 0 for none")] = 32
    provider: Annotated[ProviderChoice, option(PROVIDER_HELP)] = "auto"
    cpu_fallback: Annotated[bool, option(FALLBACK_HELP)] = False


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
    task = _read_task(options)
    cpus = usable_cpus()
    with ReferenceProcess(options.reference, cpus - _candidate_threads(cpus)) as reference:
        return _validate(task, reference)


def validate_with(reference: ReferenceProcess, options: Options) -> Report:
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


def _read_task(options: Options) -> _Task:
    _check(options)
    rules = read_gates(options.gates) if options.gates else None
    texts = read_texts(options.text)
    check_slices(rules or (), [text.name for text in texts])
    return _Task(options, rules, texts, Bundle.open(options.bundle))


def _candidate_threads(cpus: int) -> int:
    # Both sides compute at the same time, and threads beyond the CPUs would only spin.
    return max(1, cpus // 2)


def _validate(task: _Task, reference: ReferenceProcess) -> Report:
    options = task.options
    chosen = SessionSettings(provider=options.provider, cpu_fallback=options.cpu_fallback)
    candidate = Candidate(task.bundle, _candidate_threads(usable_cpus()), chosen)
    materials = prepare(task.texts, candidate, options.max_tokens)
    ready = reference.ready()
    _check_vocabulary(ready.facts, candidate)
    check_ids(materials, candidate, reference)
    window = min(options.window, candidate.context)
    comparison = compare(
        materials, candidate, reference, window=window, batch_size=options.batch_size
    )
    started = time.perf_counter()
    greedy = run_greedy(materials, candidate, reference, options.greedy_tokens)
    seconds = time.perf_counter() - started
    settings = Settings(
        window=window,
        batch_size=options.batch_size,
        max_tokens=options.max_tokens,
        greedy_tokens=options.greedy_tokens,
        rules=task.rules,
        rules_source=options.gates.name if options.gates else None,
    )
    found = Findings(materials, comparison, greedy, seconds, ready)
    return assemble_report(task.bundle, candidate, found, settings)


def _check(options: Options) -> None:
    least = {"max_tokens": 0, "window": 1, "batch_size": 1, "greedy_tokens": 0}
    for name, bound in least.items():
        if getattr(options, name) < bound:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag}: at least {bound} expected, {getattr(options, name)} given")
    if not options.text:
        raise UsageError("--text: at least one file expected, none given")
    if 0 < options.max_tokens < len(options.text):
        raise UsageError(
            f"--max-tokens {options.max_tokens} leaves nothing for some of the "
            f"{len(options.text)} texts; give at least one token for each"
        )
    if options.markdown is not None and options.markdown == options.html:
        raise UsageError(f"--markdown and --html both name {options.html}; give two files")
    for path in (options.markdown, options.html):
        if path is not None and path.exists() and not options.force:
            raise OutputError(f"{path} exists; choose another output or pass --force")
    if not Path(options.reference).exists():  # the process would need seconds to say so
        raise CheckpointError(
            f"{options.reference}: a Hugging Face folder or a .gguf file was expected, "
            "nothing is there"
        )


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
    pages = ((options.markdown, render_markdown), (options.html, render_webpage))
    files = {path: render(report) for path, render in pages if path is not None}
    write_text(files, force=options.force)
    return Outcome(render_terminal(report), report, 0 if report else 1)
