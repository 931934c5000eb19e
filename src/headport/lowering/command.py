"""`headport lower`: portable bundle → bundle for one target."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import onnx_ir as ir

from headport.bundle import Bundle, draft_bundle, refuse_overlap
from headport.certificate import rounds_in_graph
from headport.command import OptionRecord, Outcome, option, positional
from headport.errors import LoweringError, UsageError
from headport.given_rows import embedding_size
from headport.graphs import add_stage, load_graphs, rewrite_bundle
from headport.head_parts import all_parts, with_heads
from headport.kernels import FINE, needed_kernels
from headport.lowering.attention import attention_windows
from headport.lowering.candidates_check import check_candidates
from headport.lowering.head import INTEGERS, packed_name
from headport.lowering.match import Match, summarize
from headport.lowering.own_kernels import with_kernels
from headport.lowering.parity import check_parity
from headport.lowering.product_kernels import check_matrices, lower_products
from headport.lowering.product_parity import check_product_parity
from headport.lowering.targets import NEWEST, Target, find_target
from headport.lowering.tensorrt.head import computes_in_half
from headport.lowering.tensorrt.top import add_top
from headport.manifest import Head, Manifest
from headport.providers import PROVIDERS, Provider, provider_of_target
from headport.selftest import write_selftest
from headport.session import SessionSettings, check_provider
from headport.static_rounding import is_static
from headport.vocabulary_map import read_map

__all__ = ["SUMMARY", "Options", "apply_passes", "lower", "run"]

_SOURCED = ("ort-cpu",)  # targets that encoder-decoder bundles are proved on

SUMMARY = "Lower a portable bundle to one target, the last stage before it is run."


class Options(OptionRecord, frozen=True):
    """Options of `headport lower`."""

    bundle: Annotated[Path, positional("portable bundle to read")]
    output: Annotated[Path, option("bundle folder to write", flag="-o", metavar="BUNDLE")]
    target: Annotated[
        Literal["ort-cpu", "ort-cuda", "tensorrt"], option("what will run the bundle")
    ]
    top_k: Annotated[
        int | None,
        option("tensorrt: heads also give their K best logits, with original ids", metavar="K"),
    ] = None
    onnxruntime_at_least: Annotated[
        str,
        option(
            "ort-cpu: oldest ONNX Runtime that is to load it, 1.30 or 1.32; before 1.32 attention "
            "takes the prompts of a batch one after the other"
        ),
    ] = NEWEST
    kernels: Annotated[
        Path | None,
        option(
            "ort-cpu: library of headport's own kernels (`make kernels`), which products take and "
            "the bundle then needs",
            metavar="FILE",
        ),
    ] = None
    force: Annotated[bool, option("replace an existing bundle")] = False


def lower(options: Options) -> Bundle:
    """Lower a bundle.

    Raises:
        UsageError: If the target is unknown, or not known for that ONNX Runtime.
        LoweringError: If the bundle is lowered already or holds what the target cannot run.
        OutputError: If the output cannot be written.
        ParityError: If the lowered files do not answer like the portable ones.
    """
    target = find_target(
        options.target, options.onnxruntime_at_least, own_kernels=options.kernels is not None
    )
    refuse_overlap(options.bundle, options.output)
    source = Bundle.open(options.bundle)
    if source.manifest.target != "portable":
        raise LoweringError(
            f"{source.path} is already lowered to {source.manifest.target}; "
            "lower the portable bundle it was made from"
        )
    check_matrices(source.manifest.backbone_quantization, target.name)
    if options.top_k is not None and target.name != "tensorrt":
        raise UsageError(f"--top-k needs --target tensorrt; {target.name} has no use for it")
    settings, proved, unproved = _settings(target)
    settings = replace(settings, kernels=options.kernels)
    with draft_bundle(options.output, force=options.force) as draft:
        models = load_graphs(source)
        windows = attention_windows(_backbone(source.manifest, models))
        matches = apply_passes(target, source.manifest, models)
        if options.top_k is not None:
            _add_top(source, models, options.top_k)
        parts = all_parts(source.manifest)
        half = {n for n, h in parts.items() if computes_in_half(models[h.graph])}
        record, products = source.manifest.backbone_quantization, None
        if record is None or not record.matrices:  # an embedding alone is looked up as before
            matches += _pack(target, _backbone(source.manifest, models))
            manifest = rewrite_bundle(source, models, draft.path)
            preview = draft.preview(_lowered(manifest, models, target))
            parity = check_parity(source, preview, windows, settings, half_heads=half)
        else:
            # In two steps: where activations are rounded, all else would hide behind it.
            with tempfile.TemporaryDirectory(prefix=".lower.", dir=draft.path.parent) as folder:
                manifest = rewrite_bundle(source, models, Path(folder))
                unlowered = Bundle(Path(folder), _lowered(manifest, models, target))
                parity = check_parity(source, unlowered, windows, settings)
                backbone, one_row = _backbone(manifest, models), options.kernels is not None
                matches += lower_products(backbone, record, target.name, one_row=one_row)
                matches += _pack(target, backbone)
                manifest = rewrite_bundle(source, models, draft.path)
                preview = draft.preview(_lowered(manifest, models, target))
                products = check_product_parity(source, unlowered, preview, settings)
        manifest = write_selftest(preview, settings)
        candidates = {}
        if options.kernels is not None:
            candidates = check_candidates(source, preview, settings)
        lowered, portable = summarize(matches)
        report = {
            "lowered": lowered,
            "portable": portable,
            "parity": asdict(parity),
            "products": asdict(products) if products else None,
            "candidates": {name: asdict(check) for name, check in candidates.items()},
            "checked_on": proved.name,
            "unproved_on": unproved.name if unproved else target.unproved,
        }
        chosen: dict[str, Any] = {"target": target.name}
        chosen |= {"top_k": options.top_k} if options.top_k is not None else {}
        if options.kernels is not None:
            chosen |= _kernels(manifest, options.kernels)
        if options.onnxruntime_at_least != NEWEST:
            chosen["onnxruntime_at_least"] = options.onnxruntime_at_least
        return draft.commit(add_stage(manifest, "lower", chosen, report))


def _kernels(manifest: Manifest, file: Path) -> dict[str, Any]:
    """What is recorded of the library.

    Raises:
        LoweringError: If nothing took it, so that the bundle would only seem to.
    """
    found = needed_kernels(manifest.session_options, file)
    if found is None:
        raise LoweringError(
            "--kernels: the bundle has no INT8 or INT4 product, no candidates and no attention of "
            "a form that headport's kernels know; quantise it, or lower without --kernels"
        )
    return {"kernels": {"version": found.version, "instructions": found.instructions}}


def _settings(target: Target) -> tuple[SessionSettings, Provider, Provider | None]:
    """How to run what was lowered here, on which provider that is, and which stays unproved."""
    meant = provider_of_target(target.name)
    try:
        check_provider(meant)
    except UsageError:
        # The same kernels exist on the CPU, with arithmetic of their own.
        return SessionSettings(provider="cpu"), PROVIDERS["cpu"], meant
    growing_runs_too = SessionSettings(provider=meant.key, cpu_fallback=True)
    return growing_runs_too, meant, None


def _backbone(manifest: Manifest, models: dict[str, ir.Model]) -> ir.Model:
    return models[manifest.backbone_name]


def apply_passes(target: Target, manifest: Manifest, models: dict[str, ir.Model]) -> list[Match]:
    """Lower a portable bundle's graphs, which change in place; packing is not among it.

    Raises:
        LoweringError: If the target cannot run what they hold.
    """
    if manifest.source is not None and not (
        target.name in _SOURCED and target.kernel.query_seqlens
    ):
        raise LoweringError(
            f"an encoder-decoder bundle has no proved form on {target.name} as asked for; lower it "
            f"to {' or '.join(_SOURCED)} for the newest ONNX Runtime, or run the portable bundle"
        )
    if manifest.prefix is not None and target.name == "tensorrt":
        raise LoweringError(
            f"its sequences begin with {manifest.prefix.tokens} learnt tokens "
            f"({manifest.prefix.kind}), which nothing puts into the caches of TensorRT plans; "
            "lower to ort-cpu or ort-cuda"
        )
    if embedding_size(manifest) is not None and not (
        target.name == "ort-cpu" and target.kernel.query_seqlens
    ):
        raise LoweringError(
            "the backbone takes rows of embeddings (--inputs-embeds), which has no proved form on "
            f"{target.name} as asked for; lower it to ort-cpu for the newest ONNX Runtime, or run "
            "the portable bundle"
        )
    behind = [name for name, head in all_parts(manifest).items() if head.transform is not None]
    others = manifest.task_heads
    if target.name == "tensorrt" and (others or behind):
        names = ", ".join(dict.fromkeys(name.partition(".")[0] for name in (*others, *behind)))
        raise LoweringError(
            f"{names}: TensorRT plans run heads that are one product of hidden states and give "
            "logits of tokens, and these are others; lower to ort-cpu or ort-cuda"
        )
    matches: list[Match] = []
    backbone = _backbone(manifest, models)
    for rewrite in target.passes(backbone, manifest.positions):
        matches += rewrite(backbone)
    for name, head in all_parts(manifest).items():
        for rewrite_head in target.head:
            matches += rewrite_head(models[head.graph], head, name)
    return matches


def _pack(target: Target, backbone: ir.Model) -> list[Match]:
    return [match for rewrite in target.packing for match in rewrite(backbone)]


def _add_top(source: Bundle, models: dict[str, ir.Model], count: int) -> None:
    original = read_map(source)
    for head in source.manifest.heads.values():
        add_top(models[head.graph], count, original)


def _lowered(manifest: Manifest, models: dict[str, ir.Model], target: Target) -> Manifest:
    heads = {
        name: _computed(_renamed(head, models[head.graph]), target)
        for name, head in all_parts(manifest).items()
    }
    lowered = msgspec.structs.replace(with_heads(manifest, heads), target=target.name)
    return with_kernels(lowered, models)


def _renamed(head: Head, model: ir.Model) -> Head:
    # By the graph: an INT8 weight may be shared with the embedding and have another name there.
    packed = [name for name in model.graph.initializers if name.endswith(packed_name(""))]
    if not packed:
        return head
    return msgspec.structs.replace(head, weight=packed[0], tied=False)


def _computed(head: Head, target: Target) -> Head:
    """The head's entry, saying what its kernel does to activations."""
    quantization = head.quantization
    if (
        target.activations is None
        or quantization is None
        or quantization.format not in INTEGERS
        or rounds_in_graph(head)
        or is_static(head)
    ):
        return head
    exact = msgspec.structs.replace(quantization, activations=target.activations)
    return msgspec.structs.replace(head, quantization=exact)


def run(options: Options) -> Outcome:
    """Lower and say what matched and what stayed portable."""
    bundle = lower(options)
    report = bundle.manifest.provenance.stages[-1].report
    text = "\n".join(_lines(bundle, report))
    return Outcome(text, {"bundle": str(options.output), "manifest": bundle.manifest})


def _lines(bundle: Bundle, report: dict[str, Any]) -> Iterable[str]:
    parity = report["parity"]
    yield f"{bundle.path.name}: lowered to {bundle.manifest.target}"
    for what, count in report["lowered"].items():
        yield f"lowered   {count} × {what}"
    for what in report["portable"]:
        yield f"portable  {what}"
    yield (
        f"parity with the portable bundle: hidden states within "
        f"{max(parity['hidden_states'].values()):.1e} of their largest (accepted "
        f"{parity['hidden_states_limit']:.0e}) over {len(parity['hidden_states'])} ways to run it, "
        f"max |Δlogit| {parity['max_abs_logit_error']:.2g}"
    )
    if report["unproved_on"]:
        prover = "`headport gpu-check`"
        if report["unproved_on"].startswith("ONNX Runtime"):
            prover = "it has run there"
        yield (
            f"checked on {report['checked_on']}, unproved on {report['unproved_on']} until {prover}"
        )
    for name, head in parity["heads"].items():
        yield (
            f"head {name} on the same hidden states: max |Δlogit| {head['max_abs_logit_error']:.2g}"
            f", {head['largest_share_of_bound']:.1%} of what is accepted ({head['accepted']})"
        )
    for name, check in report["candidates"].items():
        yield (
            f"candidates of head {name} on {check['rows']} hidden states: all that is said of "
            f"{check['candidates']} a row follows from its bounds and original weight"
        )
    if products := report["products"]:
        check = products["check"]
        share = max(check["exact_share_of_bound"], check["real_share_of_bound"])
        fine = products["fine_change"]
        yield (
            f"{check['products']} products of the backbone against float64: at most {share:.1%} of "
            f"what is accepted; together they move hidden states by "
            f"{products['hidden_states_change']:.1%}"
            + (f", with activations of {FINE} bits by {fine:.2%}" if fine is not None else "")
        )
    if parity["windows_not_crossed"]:
        windows = ", ".join(map(str, parity["windows_not_crossed"]))
        yield f"note: no parity run was long enough to cross attention windows of {windows} tokens"
