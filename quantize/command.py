"""`headport quantize`: portable bundle → portable bundle whose head is stored in fewer bits."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.bundle import Bundle, draft_bundle
from headport.command import OptionRecord, Outcome, option, positional
from headport.errors import QuantizeError, UsageError
from headport.graphs import add_stage, load_graphs, rewrite_bundle
from headport.ledger import head_weight, read_tensor
from headport.manifest import Head, Quantization
from headport.quantize.calibration import (
    Calibration,
    calibrate,
    calibration_record,
    compensated_rounder,
    loss_ratio,
)
from headport.quantize.check import check_head
from headport.quantize.formats import FORMATS, Format
from headport.quantize.head_pass import find_product, store_head_weight
from headport.quantize.report import CalibrationReport, make_report, summary
from headport.quantize.rescoring import Rescoring, add_rescoring
from headport.selftest import write_selftest

__all__ = ["SUMMARY", "Options", "quantize", "run"]

SUMMARY = "Quantise the head of a portable bundle; the backbone and the embedding stay as they are."

_HEAD = "lm"


class Options(OptionRecord, frozen=True):
    """Options of `headport quantize`."""

    bundle: Annotated[Path, positional("portable bundle to read")]
    output: Annotated[Path, option("bundle folder to write", flag="-o", metavar="BUNDLE")]
    head: Annotated[
        Literal["int8", "int8-row", "int4", "fp16", "bf16", "fp8"],
        option("how the head's weight is stored"),
    ]
    block: Annotated[
        Literal[16, 32, 64, 128, 256] | None,
        option("int8, int4: weights of a row that share a scale (default: int8 64, int4 32)"),
    ] = None
    asymmetric: Annotated[bool, option("int4: a zero point beside each scale")] = False
    calibration: Annotated[
        tuple[Path, ...],
        option(
            "integers: texts on whose hidden states errors of rounding are compensated; "
            "without them every weight is rounded to nearest",
            metavar="FILE",
        ),
    ] = ()
    calibration_tokens: Annotated[
        int, option("at most this many tokens of the calibration texts", metavar="N")
    ] = 4096
    activations: Annotated[
        Literal["residual", "rounded", "exact"],
        option(
            "integers, once lowered: hidden states as their rounded value plus the rounded rest, "
            "rounded once (fastest), or not rounded (slow)"
        ),
    ] = "residual"
    rescore: Annotated[
        int | None,
        option(
            "integers: give this many candidates per row, scored with the original weight, "
            "instead of all logits (without M: int8 64, int4 256)",
            metavar="M",
            bare=0,
        ),
    ] = None
    certify: Annotated[bool, option("int8: prove the candidates' ranks (implies --rescore)")] = (
        False
    )
    bound: Annotated[
        Literal["row", "block"], option("certify: one norm per row, or one per block of it")
    ] = "row"
    force: Annotated[bool, option("replace an existing bundle")] = False


def quantize(options: Options) -> Bundle:
    """Quantise the head of a bundle.

    Raises:
        UsageError: If the options contradict each other.
        QuantizeError: If the bundle is lowered, its head is quantised already, or its weight
            cannot be stored as asked.
        OutputError: If the output cannot be written.
        ParityError: If the written head does not multiply with the rounded weight.
    """
    quantization = _quantization(options)
    kind, block = FORMATS[_format(options)], quantization.block or 0
    count = _candidate_count(options, kind)
    source = Bundle.open(options.bundle)
    head = _quantizable_head(source)
    entry, initializer = head_weight(source.manifest, head)
    calibration = _calibration(options, source)
    with draft_bundle(options.output, force=options.force) as draft:
        models = load_graphs(source)
        model = models[head.graph]
        bias = _bias(find_product(model, initializer))
        weight = read_tensor(source, entry)
        rounder, gain = None, None
        if calibration is not None and kind.grid is not None:
            gain = loss_ratio(weight, block or weight.shape[1], kind.grid, calibration)
            rounder = compensated_rounder(calibration)
        stored = kind.store(weight, block, rounder)
        name = store_head_weight(model, initializer, stored, kind, block)
        changed = msgspec.structs.replace(head, weight=name, tied=False, quantization=quantization)
        new_heads: dict[str, str] = {}
        if count:
            form, full = add_rescoring(
                source,
                model,
                changed,
                Rescoring(
                    count=count,
                    bound=options.bound if options.certify else None,
                    original=entry,
                    initializer=initializer,
                    stored=stored.tensors,
                    bias=bias,
                ),
            )
            changed = msgspec.structs.replace(changed, outputs="candidates", candidates=form)
            models[form.full] = full
            new_heads[form.full] = f"{form.full}.onnx"
        manifest = rewrite_bundle(source, models, draft.path, new_heads)
        heads = {**manifest.heads, _HEAD: changed}
        preview = draft.preview(msgspec.structs.replace(manifest, heads=heads))
        check = check_head(source, preview, bias, name=_HEAD, calibration=calibration)
        report = make_report(source.manifest, preview.manifest, stored, entry.length, check)
        if calibration is not None:
            report = replace(
                report, calibration=CalibrationReport(calibration.positions, gain or 1.0)
            )
        manifest = write_selftest(preview)
        chosen: dict[str, Any] = {
            "head": options.head,
            "block": quantization.block,
            "activations": quantization.activations,
            "symmetric": quantization.symmetric,
            "rounding": quantization.rounding,
        }
        if options.calibration:
            chosen |= {"calibration": calibration_record(options.calibration)}
        if count:
            chosen |= {"rescore": count, "certify": options.certify}
            chosen |= {"bound": options.bound} if options.certify else {}
        return draft.commit(add_stage(manifest, "quantize", chosen, asdict(report)))


def _format(options: Options) -> str:
    """Key of `FORMATS`."""
    if not options.asymmetric:
        return options.head
    if options.head != "int4":
        raise UsageError(f"--asymmetric needs --head int4; {options.head} has no zero points")
    return "uint4"


def _quantization(options: Options) -> Quantization:
    # Python callers may hand over a record that no command line or recipe has checked.
    kind = FORMATS.get(_format(options))
    if kind is None:
        raise UsageError(f"--head {options.head}: use one of {', '.join(FORMATS)}")
    activations = ("residual", "rounded", "exact")
    if options.activations not in activations:
        raise UsageError(
            f"--activations {options.activations}: use one of {', '.join(activations)}"
        )
    if options.block is not None and options.block not in kind.blocks:
        allowed = ", ".join(map(str, sorted(kind.blocks))) or "none: it has no blocks"
        raise UsageError(f"--block {options.block}: --head {options.head} takes {allowed}")
    if kind.grid is None:
        for name, given in (
            ("--activations rounded", options.activations == "rounded"),
            ("--calibration", bool(options.calibration)),
        ):
            if given:
                raise UsageError(
                    f"{name} has no meaning for --head {options.head}, whose products are "
                    "computed in float32; leave it out"
                )
    return Quantization(
        format=options.head,
        block=options.block or (kind.blocks[0] if kind.blocks else None),
        activations=options.activations if kind.grid else "exact",
        symmetric=not options.asymmetric,
        rounding="compensated" if options.calibration else "nearest",
    )


def _candidate_count(options: Options, kind: Format) -> int:
    asked = options.rescore
    if asked is None and not options.certify:
        return 0
    if asked is not None and asked < 0:
        raise UsageError(f"--rescore {asked}: at least 1 candidate was expected")
    if not kind.candidates:
        raise UsageError(
            f"--rescore and --certify need integers; products of --head {options.head} are not "
            "rounded enough to gain from them"
        )
    if options.certify and not kind.certifiable:
        raise UsageError(
            f"--certify needs --head int8: the errors of {options.head} are so large that no rank "
            "would be proved; use --rescore"
        )
    return asked or kind.candidates


def _calibration(options: Options, source: Bundle) -> Calibration | None:
    if not options.calibration:
        return None
    from headport.quantize.states import collect_states

    with tempfile.TemporaryDirectory(prefix="headport.") as folder:
        found = collect_states(
            source, options.calibration, Path(folder), options.calibration_tokens
        )
        return calibrate(found.parts(), source.manifest.model.hidden_size)


def _quantizable_head(bundle: Bundle) -> Head:
    manifest = bundle.manifest
    if manifest.target != "portable":
        raise QuantizeError(
            f"{bundle.path} is lowered to {manifest.target}; quantise the portable bundle it was "
            "made from, then lower again"
        )
    if _HEAD not in manifest.heads:
        known = ", ".join(manifest.heads) or "none"
        raise QuantizeError(f"{bundle.path}: no head {_HEAD!r} to quantise (heads: {known})")
    head = manifest.heads[_HEAD]
    if head.quantization is not None:
        raise QuantizeError(
            f"{bundle.path}: the head is already stored as {head.quantization.format}; "
            "quantise the bundle it was made from"
        )
    return head


def _bias(product: ir.Node) -> npt.NDArray[np.float32] | None:
    value = product.inputs[2] if len(product.inputs) > 2 else None
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None:
        raise QuantizeError(f"the head's bias {value.name} is not a constant")
    return tensor.numpy().astype(np.float32)


def run(options: Options) -> Outcome:
    """Quantise and say what was made."""
    bundle = quantize(options)
    stage = bundle.manifest.provenance.stages[-1]
    return Outcome(summary(bundle, stage.options, stage.report), _document(options, bundle))


def _document(options: Options, bundle: Bundle) -> dict[str, Any]:
    return {"bundle": str(options.output), "manifest": bundle.manifest}
