"""`headport gpu-check`: everything about a bundle that only a machine with a GPU can show."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from headport import __version__
from headport.bundle import MANIFEST, Bundle, check_text_files, file_entry, write_text
from headport.command import OptionRecord, Outcome, check_least, option, positional
from headport.errors import UsageError
from headport.gpu_probe import probe_gpu
from headport.providers import FALLBACK_HELP, PROVIDERS
from headport.session import SessionSettings, library_version
from headport.validate.gpu.hardware import (
    check_driver,
    check_placement,
    check_tensorrt_plans,
    check_tensorrt_provider,
)
from headport.validate.gpu.markdown import render_markdown, render_terminal
from headport.validate.gpu.numerics import check_greedy, check_parity, check_selftest
from headport.validate.gpu.plans import (
    check_build,
    check_refit,
    check_timing_cache,
    check_version_compatible,
)
from headport.validate.gpu.report import (
    GPU_REPORT_SCHEMA_VERSION,
    GpuReport,
    StepRecord,
    decide,
)
from headport.validate.gpu.speed import check_capture, measure_latency
from headport.validate.gpu.steps import Context, Step, run_steps

__all__ = ["STEPS", "SUMMARY", "Options", "gpu_check", "run"]

SUMMARY = "Check on a machine with a GPU what a bundle does there: answers, speed, memory."

STEPS = (
    Step("driver", "NVIDIA driver and cards", check_driver),
    Step("provider", "where each operator runs", check_placement, ("driver",)),
    Step("selftest", "stored outputs", check_selftest, ("provider",)),
    Step("parity", "PyTorch's logits", check_parity, ("provider",)),
    Step("greedy", "the CPU's tokens", check_greedy, ("provider",)),
    Step("latency", "time per token, memory", measure_latency, ("provider",)),
    Step("cuda-graph", "recorded decode steps", check_capture, ("provider",)),
    Step("tensorrt-provider", "ONNX Runtime's TensorRT", check_tensorrt_provider, ("driver",)),
    Step("tensorrt-plans", "the bundle's engines", check_tensorrt_plans, ("driver",)),
    Step("tensorrt-build", "plans built here", check_build, ("driver",)),
    Step("tensorrt-timing-cache", "timings kept", check_timing_cache, ("tensorrt-build",)),
    Step(
        "tensorrt-version-compatible",
        "plans for later versions",
        check_version_compatible,
        ("tensorrt-build",),
    ),
    Step("tensorrt-refit", "plans without weights", check_refit, ("tensorrt-build",)),
)


class Options(OptionRecord, frozen=True):
    """Options of `headport gpu-check`."""

    bundle: Annotated[Path, positional("bundle folder, lowered to ort-cuda or portable")]
    reference: Annotated[
        str | None, option("checkpoint to compare with, as for validate", metavar="MODEL")
    ] = None
    text: Annotated[tuple[Path, ...], option("texts to compare on", metavar="FILE")] = ()
    gates: Annotated[Path | None, option("limits of the comparison, as for validate")] = None
    max_tokens: Annotated[int, option("tokens to compare in all, 0 for all")] = 2000
    batch_size: Annotated[int, option("windows run together in the comparison")] = 4
    skip: Annotated[
        tuple[str, ...],
        option(f"steps to leave out, of {', '.join(s.name for s in STEPS)}", metavar="STEP"),
    ] = ()
    cpu_fallback: Annotated[bool, option(FALLBACK_HELP)] = False
    output: Annotated[
        Path | None,
        option("report to write as JSON, and beside it as Markdown", flag="-o", metavar="REPORT"),
    ] = None
    force: Annotated[bool, option("replace an existing report")] = False


def gpu_check(options: Options) -> GpuReport:
    """Run the steps; the report is rewritten after each, so that a crash leaves what was found.

    Raises:
        UsageError: If an option is wrong.
        BundleError: If the bundle is damaged.
        OutputError: If the report exists and `force` is False.
    """
    check_least(options, {"max_tokens": 0, "batch_size": 1})
    pages = _pages(options)
    bundle = Bundle.open(options.bundle)
    bundle.require_decoder_only("a check on a GPU", "run it on the CPU")
    settings = SessionSettings(provider="cuda", cpu_fallback=options.cpu_fallback)
    context = Context(options, bundle, settings)

    def save(records: tuple[StepRecord, ...]) -> None:
        if pages:
            _write(pages, _report(bundle, options, records))

    records = run_steps(STEPS, context, options.skip, save)
    return _report(bundle, options, records)


def _pages(options: Options) -> tuple[Path, Path] | None:
    if options.output is None:
        return None
    if options.output.suffix != ".json":
        raise UsageError(f"-o {options.output}: a name ending in .json was expected")
    pages = (options.output, options.output.with_suffix(".md"))
    check_text_files(pages, force=options.force)
    return pages


def _write(pages: tuple[Path, Path], report: GpuReport) -> None:
    document = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    write_text({pages[0]: document, pages[1]: render_markdown(report)}, force=True)


def _report(bundle: Bundle, options: Options, records: tuple[StepRecord, ...]) -> GpuReport:
    manifest, probe, provider = bundle.manifest, probe_gpu(), PROVIDERS["cuda"]
    return GpuReport(
        schema_version=GPU_REPORT_SCHEMA_VERSION,
        verdict=decide(records),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        headport=__version__,
        bundle=bundle.path.resolve().name,
        manifest_sha256=file_entry(bundle.path / MANIFEST).sha256,
        target=manifest.target,
        dtype=manifest.model.dtype,
        heads={
            name: "not quantised"
            if head.quantization is None
            else f"{head.quantization.format}, activations {head.quantization.activations}"
            for name, head in manifest.heads.items()
        },
        gpus=tuple(gpu.name for gpu in probe.gpus),
        driver=probe.driver,
        machine=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions={"onnxruntime": library_version(), "python": platform.python_version()},
        provider=provider.name,
        provider_options=dict(provider.options),
        cpu_fallback=options.cpu_fallback,
        steps=records,
    )


def run(options: Options) -> Outcome:
    """Check; exit 0 if something was proved and nothing failed, else 1."""
    report = gpu_check(options)
    return Outcome(render_terminal(report), report, 0 if report else 1)
