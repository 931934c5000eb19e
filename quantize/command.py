"""`headport quantize`: portable bundle → portable bundle whose head is stored in fewer bits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
from headport.manifest import Head, Manifest, Quantization
from headport.quantize.blocks import BLOCKS
from headport.quantize.check import HeadCheck, check_head
from headport.quantize.formats import FORMATS, StoredWeight
from headport.quantize.head_pass import find_product, store_head_weight
from headport.quantize.rescoring import Rescoring, RescoringBytes, add_rescoring, bytes_of
from headport.selftest import write_selftest

__all__ = ["SUMMARY", "Options", "quantize", "run"]

SUMMARY = "Quantise the head of a portable bundle; the backbone and the embedding stay as they are."

_HEAD = "lm"
DEFAULT_COUNT = 64  # candidates of a certified head; docs/exact-head.md has the table


class Options(OptionRecord, frozen=True):
    """Options of `headport quantize`."""

    bundle: Annotated[Path, positional("portable bundle to read")]
    output: Annotated[Path, option("bundle folder to write", flag="-o", metavar="BUNDLE")]
    head: Annotated[Literal["int8", "fp16"], option("how the head's weight is stored")]
    block: Annotated[
        Literal[16, 32, 64, 128, 256], option("int8: weights of a row that share one scale")
    ] = 64
    activations: Annotated[
        Literal["residual", "rounded", "exact"],
        option(
            "int8, once lowered: hidden states as their rounded value plus the rounded rest, "
            "rounded once (fastest), or not rounded (slow)"
        ),
    ] = "residual"
    rescore: Annotated[
        int,
        option(
            "int8: give this many candidates per row, scored with the original weight, "
            "instead of all logits; 0 = all logits",
            metavar="M",
        ),
    ] = 0
    certify: Annotated[
        bool, option(f"int8: prove the candidates' ranks (implies --rescore {DEFAULT_COUNT})")
    ] = False
    bound: Annotated[
        Literal["row", "block"], option("certify: one norm per row, or one per block of it")
    ] = "row"
    force: Annotated[bool, option("replace an existing bundle")] = False


@dataclass(frozen=True)
class QuantizeReport:
    """What quantising did: errors of the weight, sizes in bytes, and the check's outcome."""

    rows: int
    row_error_max: float  # ‖W_v − Ŵ_v‖ / ‖W_v‖, the worst row
    row_error_p99: float
    rows_lost: int  # rows whose error is at least half their norm
    weight_bytes_before: int  # of which nothing is freed where the weight was tied
    weight_bytes_after: int
    tensor_bytes_before: int  # of the whole bundle
    tensor_bytes_after: int
    was_tied: bool  # to the input embedding, which stays as it was
    check: HeadCheck
    rescoring: RescoringBytes | None  # None: the head gives all logits


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
    count = _candidate_count(options)
    kind, block = FORMATS[options.head], options.block
    source = Bundle.open(options.bundle)
    head = _quantizable_head(source)
    entry, initializer = head_weight(source.manifest, head)
    with draft_bundle(options.output, force=options.force) as draft:
        models = load_graphs(source)
        model = models[head.graph]
        bias = _bias(find_product(model, initializer))
        stored = kind.store(read_tensor(source, entry), block)
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
        check = check_head(source, preview, bias, _HEAD)
        report = _report(source.manifest, preview.manifest, stored, entry.length, check)
        manifest = write_selftest(preview)
        chosen: dict[str, Any] = {
            "head": options.head,
            "block": quantization.block,
            "activations": quantization.activations,
        }
        if count:
            chosen |= {"rescore": count, "certify": options.certify}
            chosen |= {"bound": options.bound} if options.certify else {}
        return draft.commit(add_stage(manifest, "quantize", chosen, asdict(report)))


def _quantization(options: Options) -> Quantization:
    # Python callers may hand over a record that no command line or recipe has checked.
    for value, allowed, name in (
        (options.head, tuple(FORMATS), "head"),
        (options.block, BLOCKS, "block"),
        (options.activations, ("residual", "rounded", "exact"), "activations"),
    ):
        if value not in allowed:
            raise UsageError(f"--{name} {value}: use one of {', '.join(map(str, allowed))}")
    if FORMATS[options.head].has_blocks:
        return Quantization(
            format=options.head, block=options.block, activations=options.activations
        )
    if options.activations == "rounded":
        raise UsageError(
            f"--activations rounded has no meaning for --head {options.head}, "
            "whose products are computed in float32; leave it out"
        )
    return Quantization(format=options.head, block=None, activations="exact")


def _candidate_count(options: Options) -> int:
    if options.rescore < 0:
        raise UsageError(f"--rescore {options.rescore}: at least 1 candidate, or 0 for all logits")
    count = options.rescore or (DEFAULT_COUNT if options.certify else 0)
    if count and not FORMATS[options.head].has_blocks:
        raise UsageError(
            f"--rescore and --certify need --head int8; products of --head {options.head} are not "
            "rounded enough to gain from them"
        )
    return count


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


def _report(
    before: Manifest, after: Manifest, stored: StoredWeight, weight_bytes: int, check: HeadCheck
) -> QuantizeReport:
    errors = stored.row_errors
    head = after.heads[_HEAD]
    return QuantizeReport(
        rows=len(errors),
        row_error_max=float(errors.max()),
        row_error_p99=float(np.quantile(errors, 0.99)),
        rows_lost=int((errors >= 0.5).sum()),
        weight_bytes_before=weight_bytes,
        weight_bytes_after=stored.nbytes,
        tensor_bytes_before=sum(t.length for t in before.tensors),
        tensor_bytes_after=sum(t.length for t in after.tensors),
        was_tied=before.heads[_HEAD].tied,
        check=check,
        rescoring=bytes_of(after, head) if head.candidates is not None else None,
    )


def run(options: Options) -> Outcome:
    """Quantise and say what was made."""
    bundle = quantize(options)
    stage = bundle.manifest.provenance.stages[-1]
    return Outcome(_text(bundle, stage.options, stage.report), _document(options, bundle))


def _document(options: Options, bundle: Bundle) -> dict[str, Any]:
    return {"bundle": str(options.output), "manifest": bundle.manifest}


def _text(bundle: Bundle, chosen: dict[str, Any], report: dict[str, Any]) -> str:
    what = chosen["head"]
    if chosen["block"] is not None:
        what += f", block {chosen['block']}, activations {chosen['activations']} once lowered"
    tied = " (the embedding, which it was tied to, stays)" if report["was_tied"] else ""
    megabytes = {key: f"{report[key] / 1e6:.1f} MB" for key in report if "_bytes_" in key}
    check = report["check"]
    lines = [
        f"{bundle.path.name}: head stored as {what}",
        f"head weight {megabytes['weight_bytes_before']} → {megabytes['weight_bytes_after']}{tied}",
        f"all tensors {megabytes['tensor_bytes_before']} → {megabytes['tensor_bytes_after']}",
        f"relative error of a row: p99 {report['row_error_p99']:.2e}, "
        f"max {report['row_error_max']:.2e} ({report['rows']} rows)",
        f"check against float64: max |Δlogit| {check['max_abs_logit_error']:.1e}, at most "
        f"{check['largest_share_of_bound']:.1%} of its rounding bound ({check['logits']} logits)",
    ]
    if report["rescoring"]:
        lines += _rescoring_lines(bundle, report["rescoring"])
    if report["rows_lost"]:
        lines.append(
            f"warning: {report['rows_lost']} rows lost half of their norm or more; they are too "
            f"small for {chosen['head']}"
        )
    return "\n".join(lines)


def _rescoring_lines(bundle: Bundle, sizes: dict[str, Any]) -> list[str]:
    form = bundle.manifest.heads[_HEAD].candidates
    assert form is not None
    proof = f", ranks proved by a bound per {form.bound}" if form.certified else ""
    where = "shared with the embedding" if sizes["original_shared"] else "kept beside it"
    return [
        f"{form.count} candidates per row, scored with the original weight{proof}",
        f"original weight {sizes['original'] / 1e6:.1f} MB, {where}; certificate "
        f"{sizes['certificate'] / 1e6:.1f} MB",
        f"read per token {sizes['read_per_token'] / 1e6:.1f} MB, per fallback "
        f"{sizes['read_per_fallback'] / 1e6:.1f} MB more; held in memory "
        f"{sizes['resident'] / 1e6:.1f} MB",
    ]
