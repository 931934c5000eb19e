"""`headport tune`: a bundle that knows with how many threads it answers fastest on this machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headport.bundle import Bundle, copy_files, draft_bundle, refuse_overlap
from headport.command import OptionRecord, Outcome, check_least, option, positional
from headport.encoder_runner import is_encoder
from headport.errors import BundleError, LoweringError, ParityError, UsageError
from headport.kernels import needed_kernels
from headport.machine import cpu_features, cpu_model, physical_cores, usable_cpus
from headport.manifest import Manifest, Tuning
from headport.progress import bar
from headport.runtime.tuning.candidates import Candidate, candidates_of, thread_counts
from headport.runtime.tuning.measure import Task, measure_apart
from headport.runtime.tuning.table import Measured, Row, choose, rows_of
from headport.selftest import run_selftest
from headport.session import SessionSettings, library_version
from headport.stages import with_stage
from headport.tuned import applies_here, machine_text, threads_text

__all__ = ["SUMMARY", "Options", "check", "run", "tune"]

SUMMARY = "Measure with how many threads a bundle answers fastest here, and record it."
_TARGET = "ort-cpu"
# Between rounds; on an idle machine equal processes differ by about a tenth.
_BUSY = 1.5


class Options(OptionRecord, frozen=True):
    """Options of `headport tune`."""

    bundle: Annotated[Path, positional("bundle to read, lowered to ort-cpu")]
    output: Annotated[Path, option("bundle folder to write", flag="-o", metavar="BUNDLE")]
    threads: Annotated[
        tuple[int, ...],
        option("numbers of threads to try (default: powers of two, all cores, all CPUs)"),
    ] = ()
    rounds: Annotated[int, option("runs of each candidate, each in a process of its own")] = 5
    steps: Annotated[int, option("tokens per run after the first, less in a short context")] = 32
    prompt: Annotated[int, option("tokens of the prompt, less in a short context")] = 64
    margin: Annotated[
        float, option("share of the fastest's time within which fewer threads are preferred")
    ] = 0.03
    head: Annotated[str, option("the head that tokens are chosen with")] = "lm"
    force: Annotated[bool, option("replace an existing bundle")] = False


Measure = Callable[[Task, Candidate], Measured]


def check(options: Options) -> None:
    """Refuse what no measurement can be made with, or recorded for.

    Raises:
        UsageError: If a number is out of range, or this system does not name its CPU.
    """
    check_least(options, {"rounds": 1, "steps": 1, "prompt": 1})
    if not 0.0 <= options.margin < 1.0:
        raise UsageError(f"--margin: a share from 0 up to 1 was expected, {options.margin} given")
    candidates_of(options.threads, usable_cpus())
    if not cpu_model():
        raise UsageError(
            "this system does not name the model of its CPU, by which a record is known again; "
            "pass threads to each verb that runs the bundle instead"
        )


def tune(options: Options, measure: Measure = measure_apart) -> Bundle:
    """Write a bundle that carries the fastest way to run it on this kind of machine.

    Its files are those of the input; only the manifest changes. What it recorded of other kinds of
    machine stays, what it recorded of this one is replaced.

    Args:
        options: Of the verb.
        measure: Measures one candidate once.

    Raises:
        UsageError: If an option is out of range, or this system does not name its CPU.
        LoweringError: If the bundle is not lowered to ort-cpu.
        BundleError: If the bundle is damaged, has no such head, or does not run.
        OutputError: If the output cannot be written.
        ParityError: If the bundle's self-test fails with the threads that were chosen.
    """
    check(options)
    cpu, cpus = cpu_model(), usable_cpus()
    candidates = candidates_of(options.threads or thread_counts(cpus, physical_cores()), cpus)
    refuse_overlap(options.bundle, options.output)
    source = Bundle.open(options.bundle)
    _check_bundle(source, options.head)
    needed_kernels(source.manifest.session_options)
    with draft_bundle(options.output, force=options.force) as draft:
        task = _task(source, options)
        rounds = _measured(task, candidates, options.rounds, measure)
        rows = rows_of(rounds)
        chosen = choose(rows, options.margin)
        record = Tuning(
            cpu=cpu,
            cpus=cpus,
            instructions=cpu_features(),
            onnxruntime=library_version(),
            threads=chosen.threads,
            spinning=chosen.spinning,
        )
        others = tuple(each for each in source.manifest.tuned if not applies_here(each))
        copy_files(source.path, source.manifest.files, draft.path)
        manifest = msgspec.structs.replace(source.manifest, tuned=(*others, record))
        _prove(draft.preview(manifest), chosen.candidate)
        answers = {found.answers for measured in rounds for found in measured.values()}
        report = {
            "machine": {"cpu": cpu, "cpus": cpus, "instructions": record.instructions},
            "prompt": task.prompt,
            "steps": task.steps,
            "rows": [msgspec.to_builtins(row) for row in rows],
            "chosen": msgspec.to_builtins(chosen.candidate),
            "same_answers": len(answers) == 1,
        }
        asked = {"rounds": options.rounds, "margin": options.margin, "head": options.head}
        return draft.commit(with_stage(manifest, "tune", asked, report))


def _check_bundle(source: Bundle, head: str) -> None:
    """Refuse what has no decode step of an ort-cpu bundle, or no such head."""
    manifest = source.manifest
    if manifest.target != _TARGET:
        raise LoweringError(
            f"{source.path}: a bundle lowered to {_TARGET} was expected, target {manifest.target} "
            f"was found; run `headport lower --target {_TARGET}` first"
        )
    if is_encoder(manifest):
        raise LoweringError(
            f"{source.path} is the bundle of an encoder, which has no steps to measure; pass "
            "threads to `headport heads`"
        )
    if head not in manifest.heads:
        known = ", ".join(manifest.heads) or "none"
        raise BundleError(f"{source.path}: no head {head!r} in it (heads: {known})")


def _task(source: Bundle, options: Options) -> Task:
    """What fits the context: a prompt, and steps after it; at least one token of each."""
    context = source.manifest.model.max_context
    prompt = min(options.prompt, max(1, context // 2))
    steps = min(options.steps, context - prompt - 1)
    if steps < 1:
        raise BundleError(
            f"{source.path}: a context of at least 3 tokens was expected, it has {context}"
        )
    return Task(bundle=str(source.path), head=options.head, prompt=prompt, steps=steps)


def _measured(
    task: Task, candidates: tuple[Candidate, ...], rounds: int, measure: Measure
) -> list[dict[Candidate, Measured]]:
    """Every candidate once per round, in an order of each round's own."""
    order = random.Random(0)
    found = []
    with bar(rounds * len(candidates), "tune", "run") as progress:
        for _ in range(rounds):
            measured = {}
            for candidate in order.sample(candidates, len(candidates)):
                measured[candidate] = measure(task, candidate)
                progress.update()
            found.append(measured)
    return found


def _prove(bundle: Bundle, chosen: Candidate) -> None:
    settings = SessionSettings(threads=chosen.threads, spinning=chosen.spinning)
    if not (result := run_selftest(bundle, settings)):
        raise ParityError(
            f"with {chosen.text()} the bundle fails its self-test: hidden states differ by "
            f"{result.hidden_states_error:.2g}, logits by "
            f"{max(result.logits_error.values(), default=0.0):.2g}; nothing was written"
        )


def run(options: Options) -> Outcome:
    """Tune and show what was measured."""
    bundle = tune(options)
    report = bundle.manifest.provenance.stages[-1].report
    text = "\n".join(_lines(bundle.path.name, bundle.manifest, report))
    return Outcome(text, {"bundle": str(options.output), **report})


def _lines(name: str, manifest: Manifest, report: dict[str, Any]) -> Iterator[str]:
    record = manifest.tuned[-1]
    rows = [msgspec.convert(row, Row) for row in report["rows"]]
    chosen = next(row for row in rows if row.candidate == (Candidate(**report["chosen"])))
    machine = machine_text(record.cpus, record.cpu)
    yield f"{name}: {machine}; ONNX Runtime {record.onnxruntime}"
    given = "a source" if manifest.source else f"a prompt of {report['prompt']} tokens"
    yield f"{given}, {report['steps']} steps after it"
    yield f"{'':27}{'ms/token':>9}{'least–most':>18}{'ratio':>8}{'prompt ms':>12}{'ratio':>8}"
    for row in rows:
        spread = f"{row.decode_least_ms:.2f}–{row.decode_most_ms:.2f}"
        yield (
            f"{'→' if row is chosen else ' '} {row.candidate.text():25}{row.decode_ms:9.2f}"
            f"{spread:>18}{row.decode_ratio:8.3f}{row.prompt_ms:12.1f}{row.prompt_ratio:8.3f}"
        )
    quickest = min(rows, key=lambda row: row.prompt_ratio)
    if chosen.prompt_ratio > 1.1 * quickest.prompt_ratio:
        times = chosen.prompt_ratio / quickest.prompt_ratio
        yield (
            f"note: prompts take {times:.1f} times as long as with {quickest.candidate.text()}; "
            "where they are most of the work, pass threads yourself"
        )
    if any(row.decode_most_ms > _BUSY * row.decode_least_ms for row in rows):
        yield "note: times of the same threads differ widely; measure again on an idle machine"
    yield f"recorded: {threads_text(record.threads, record.spinning)}; the self-test passed with it"
    same = "the same bits" if report["same_answers"] else "not the same bits, see docs/tune.md"
    yield f"answers of all of them: {same}"
