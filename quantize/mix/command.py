"""`headport mix`: which matrices of a backbone may be INT4 and which stay INT8, by measurement."""

from __future__ import annotations

import math
import platform
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headport.bundle import Bundle
from headport.command import OptionRecord, Outcome, check_least, option, positional
from headport.errors import QuantizeError, UsageError
from headport.machine import usable_cpus
from headport.quantize.backbone import quantizable_backbone
from headport.quantize.backbone_plan import stored_text
from headport.quantize.calibration import calibration_record
from headport.quantize.head import HEAD
from headport.quantize.mix.choosing import Budget
from headport.quantize.mix.measuring import Bench, choose
from headport.quantize.mix.report import (
    GroupRow,
    MixReport,
    render_markdown,
    terminal_lines,
)
from headport.quantize.mix.request import command_line, mix_options, parse_formats
from headport.quantize.report_files import Renderers, check_report_files, write_reports
from headport.quantize.shared_texts import refuse_shared_texts
from headport.session import SessionSettings, library_version

__all__ = ["SUMMARY", "Options", "mix", "run"]

SUMMARY = "Choose by measurement which matrices of a backbone get the smaller of two formats."


class Options(OptionRecord, frozen=True):
    """Options of `headport mix`; one of the budgets is needed."""

    bundle: Annotated[Path, positional("portable float32 bundle, its backbone not quantised")]
    text: Annotated[
        tuple[Path, ...], option("texts to measure on, one document each", metavar="FILE")
    ]
    held_out: Annotated[
        tuple[Path, ...],
        option(
            "texts that the chosen mix must keep its budget on as well (default: the second half "
            "of each --text)",
            metavar="FILE",
        ),
    ] = ()
    formats: Annotated[
        tuple[str, ...],
        option(
            "the smaller format and the larger one, as --override of quantize takes them (default: "
            "int4:64 int8:64)",
            metavar="FORMAT[:BLOCK][:ACTIVATIONS]",
        ),
    ] = ("int4:64", "int8:64")
    budget_kl: Annotated[
        float | None, option("mean KL that the mix may cost, in nats", metavar="X")
    ] = None
    budget_ppl: Annotated[
        float | None, option("perplexity ratio that it may have, such as 1.02", metavar="X")
    ] = None
    budget_bytes: Annotated[
        int | None, option("bytes that its matrices may take, scales included", metavar="N")
    ] = None
    tokens: Annotated[
        int, option("at most this many tokens of the texts, and of those held out", metavar="N")
    ] = 512
    depth_parts: Annotated[
        int, option("the layers of each kind of matrix are cut into this many groups", metavar="N")
    ] = 3
    threads: Annotated[int, option("threads of ONNX Runtime; 0 = all CPUs")] = 0
    report: Annotated[
        tuple[Path, ...],
        option("write the report here: .json or .md by the name", metavar="FILE"),
    ] = ()
    force: Annotated[bool, option("replace existing reports")] = False


_RENDERERS: Renderers = {".md": render_markdown}


def mix(options: Options) -> MixReport:
    """Measure every group, choose, and measure what was chosen.

    Raises:
        UsageError: If options contradict each other, or a text cannot be read or is too short.
        QuantizeError: If the bundle is lowered, quantised already, not of float32, without a head
            over the vocabulary, or a format cannot hold its weights.
        ParityError: If the measurement itself differs from the bundle.
    """
    start = time.perf_counter()
    budget = _budget(options)
    formats = parse_formats(options.formats)
    check_least(options, {"tokens": 2 * len(options.text), "depth_parts": 1})
    refuse_shared_texts(
        options.text,
        options.held_out,
        ("--text", "--held-out"),
        "figures on the text that was chosen by flatter, give others",
    )
    source = Bundle.open(options.bundle)
    _check_source(source)
    settings = SessionSettings(threads=options.threads)
    with tempfile.TemporaryDirectory(prefix="headport.") as folder:
        bench = Bench(
            source,
            (options.text, options.held_out),
            formats,
            tokens=options.tokens,
            parts=options.depth_parts,
            folder=Path(folder),
            settings=settings,
        )
        choice = choose(bench, budget)
    groups = [cost.group for cost in choice.costs]
    chosen = groups[: choice.chosen.groups]
    names = list(bench.groups)
    made = mix_options(names, [group for group in names if group in chosen], formats)
    return MixReport(
        bundle=options.bundle.name,
        checkpoint=source.manifest.provenance.checkpoint,
        formats=(stored_text(formats[0]), stored_text(formats[1])),
        budget={"of": budget.of, "limit": budget.limit},
        met=choice.met,
        groups=tuple(
            GroupRow(
                label=cost.group.label,
                patterns=cost.group.patterns,
                matrices=len(cost.group.names),
                bytes_saved=cost.bytes_saved,
                alone=cost.alone,
                chosen=place < choice.chosen.groups,
            )
            for place, cost in enumerate(choice.costs)
        ),
        chosen=choice.chosen,
        all_small=choice.all_small,
        all_large=choice.all_large,
        sum_of_parts=choice.sum_of_parts,
        held_out_mixes=choice.held_out_mixes,
        own_kl=bench.own.kl_mean,
        options=made,
        command=command_line(options.bundle, made),
        texts=calibration_record(options.text),
        held_out=calibration_record(options.held_out),
        threads=options.threads or usable_cpus(),
        machine=f"{platform.machine()}, Python {platform.python_version()}",
        onnxruntime=library_version(),
        seconds=time.perf_counter() - start,
    )


def _budget(options: Options) -> Budget:
    given: list[Budget] = []
    if (kl := options.budget_kl) is not None:
        given.append(Budget("kl", _above(kl, 0, "--budget-kl", "nats of mean KL")))
    if (ratio := options.budget_ppl) is not None:
        given.append(Budget("ppl", _above(ratio, 1, "--budget-ppl", "a perplexity ratio")))
    if (nbytes := options.budget_bytes) is not None:
        given.append(Budget("bytes", _above(nbytes, 0, "--budget-bytes", "bytes")))
    if len(given) != 1:
        raise UsageError(
            f"one of --budget-kl, --budget-ppl and --budget-bytes was expected, {len(given)} given"
        )
    return given[0]


def _above(value: float, bound: float, name: str, what: str) -> float:
    if not (math.isfinite(value) and value > bound):
        raise UsageError(f"{name} {value}: {what} above {bound} expected")
    return value


def _check_source(source: Bundle) -> None:
    source.require_decoder_only(
        "a mix of formats", "quantise its head with `headport quantize --head`"
    )
    quantizable_backbone(source)
    if HEAD not in source.manifest.heads:
        known = ", ".join(source.manifest.heads) or "none"
        raise QuantizeError(
            f"{source.path}: a head {HEAD!r} was expected, whose next-token distributions are "
            f"compared (heads over the vocabulary: {known})"
        )


def run(options: Options) -> Outcome:
    """Choose, write the reports, and print the table; exit 1 if no mix keeps the budget."""
    check_report_files(options.report, _RENDERERS, force=options.force)
    report = mix(options)
    shown: dict[str, Any] = msgspec.to_builtins(report)
    text = "\n".join(terminal_lines(shown))
    document = write_reports(options.report, report, _RENDERERS, text, force=options.force)
    return Outcome(text, document, exit_code=0 if report.met else 1)
