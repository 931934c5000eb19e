"""`headport lint`: what a target would refuse, widen or ignore in a bundle, before it is tried."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import onnx_ir.passes.common as common_passes

from headport.bundle import Bundle
from headport.command import OptionRecord, Outcome, check_least, option, positional
from headport.errors import LoweringError, UsageError
from headport.graphs import load_graphs
from headport.lint.findings import Finding, Subject
from headport.lint.ranges import find_overflows
from headport.lint.rules import lint_bundle
from headport.lowering.command import apply_passes
from headport.lowering.targets import TARGETS

__all__ = ["SUMMARY", "Options", "lint", "run"]

SUMMARY = "Say what a target refuses, widens or ignores in a bundle."


class Options(OptionRecord, frozen=True):
    """Options of `headport lint`."""

    bundle: Annotated[Path, positional("bundle folder: portable, or lowered to the target")]
    target: Annotated[
        Literal["ort-cpu", "ort-cuda", "tensorrt"], option("what is to run the bundle")
    ]
    calibration: Annotated[
        tuple[Path, ...],
        option(
            "tensorrt: texts on which the backbone's values are measured against what half "
            "precision holds",
            metavar="FILE",
        ),
    ] = ()
    calibration_tokens: Annotated[
        int, option("at most this many tokens of each text", metavar="N")
    ] = 2048


def lint(options: Options) -> list[Finding]:
    """Look at a bundle's graphs as a target would get them; a portable one is lowered in memory.

    Raises:
        UsageError: If an option is wrong.
        LoweringError: If the bundle is lowered to another target, or cannot be lowered.
    """
    check_least(options, {"calibration_tokens": 1})
    if options.target not in TARGETS:
        raise UsageError(f"--target {options.target}: use one of {', '.join(TARGETS)}")
    if options.calibration and options.target != "tensorrt":
        raise UsageError("--calibration needs --target tensorrt, which computes in half precision")
    bundle = Bundle.open(options.bundle)
    manifest = bundle.manifest
    models = load_graphs(bundle)
    if manifest.target == "portable":
        apply_passes(TARGETS[options.target], manifest, models)
    elif manifest.target != options.target:
        raise LoweringError(
            f"{bundle.path} is lowered to {manifest.target}; lint the portable bundle it was made "
            f"from for {options.target}"
        )
    for model in models.values():
        # Types of what passes have written; rules go by them.
        common_passes.ShapeInferencePass()(model)
    found = list(lint_bundle(Subject(bundle, manifest, models), options.target))
    if options.calibration:
        name = manifest.backbone_name
        found += find_overflows(
            bundle, name, models[name], options.calibration, options.calibration_tokens
        )
    return found


def run(options: Options) -> Outcome:
    """Lint and list; exit 1 if there is an error."""
    found = lint(options)
    errors = sum(finding.severity == "error" for finding in found)
    lines = [str(finding) for finding in found]
    lines.append(
        f"{options.bundle.name} for {options.target}: {errors} errors, "
        f"{len(found) - errors} warnings"
    )
    document = {"target": options.target, "findings": [asdict(finding) for finding in found]}
    return Outcome("\n".join(lines), document, 1 if errors else 0)
