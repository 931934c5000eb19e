"""`headport engine`: a bundle's graphs as TensorRT plans, each with its build record.

What comes out is *built*. Whether it answers right only a run on its GPU can tell.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headport.bundle import Bundle, copy_files, draft_bundle, refuse_overlap
from headport.command import Outcome, check_least
from headport.engines import FOLDER, MERGED, EngineRecord
from headport.errors import LoweringError, UsageError
from headport.given_rows import refuse_embeddings
from headport.progress import bar
from headport.runtime.engine.backends import compute_capabilities, load_backend, missing_options
from headport.runtime.engine.options import Options
from headport.runtime.engine.plan import Source, build_recorded, given_options
from headport.runtime.engine.profiles import default_profile, parse_profiles

__all__ = ["SUMMARY", "Options", "check", "engine", "run"]

SUMMARY = "Build TensorRT plans of a bundle's graphs."


def engine(options: Options) -> Bundle:
    """Build plans; the bundle that comes out holds them, the graphs they were made of, and records.

    Raises:
        UsageError: If an option is wrong, or one that the backend has no means for; found before
            anything is built.
        LoweringError: If the bundle is lowered to another target, or cannot be lowered.
        OutputError: If the output cannot be written.
        EngineError: If a plan cannot be built, with what the parser or the builder says.
        ParityError: If a plan does not hold a head's integers as they are stored.
    """
    check(options)
    refuse_overlap(options.bundle, options.output)
    source = Bundle.open(options.bundle)
    source.require_decoder_only("an engine", "lower it to ort-cpu")
    refuse_embeddings(source, "an engine", "export without it")
    source.require_no_prefix("an engine", "lower it to ort-cuda or ort-cpu")
    words = options.profile or default_profile(source.manifest.model.max_context)
    profiles = parse_profiles(words, source.manifest.model.max_context)
    with (
        draft_bundle(options.output, force=options.force) as draft,
        tempfile.TemporaryDirectory(prefix=".engine.", dir=draft.path.parent) as scratch,
    ):
        lowered = _lowered(source, options, Path(scratch))
        copy_files(lowered.path, _kept(lowered), draft.path)
        bundle = Bundle(draft.path, lowered.manifest)
        (draft.path / FOLDER).mkdir()
        records = []
        sources = _sources(bundle, options, Path(scratch))
        with bar(len(sources), "plan") as progress:
            for each in sources:
                built = build_recorded(
                    bundle, each, profiles=profiles, options=options, scratch=Path(scratch)
                )
                records.append(built)
                progress.update()
        report = {"status": "built", "plans": [_summary(record) for record in records]}
        # Imported late: it needs ONNX libraries, which options are checked without.
        from headport.graphs import add_stage

        manifest = add_stage(bundle.manifest, "engine", _chosen(options, words), report)
        return draft.commit(manifest)


def check(options: Options) -> None:
    """Refuse options that are wrong or that the installed backend has no means for.

    Raises:
        UsageError: If there are such; or if the backend is not installed.
    """
    given = {name: getattr(options, name) for name in options.__struct_fields__}
    numbers = ("timeout", "workspace", "memory")
    check_least(options, {name: 1 for name in numbers if given[name] is not None})
    trt = load_backend(options.backend)
    if missing := list(missing_options(trt, given)):
        names = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise UsageError(f"{names}: {options.backend} {trt.__version__} has no such option")
    known = compute_capabilities(trt)
    if unknown := [name for name in options.compute_capability if name not in known]:
        raise UsageError(
            f"--compute-capability {' '.join(unknown)}: {options.backend} {trt.__version__} "
            f"builds for {', '.join(known)}"
        )


def _lowered(source: Bundle, options: Options, scratch: Path) -> Bundle:
    target = source.manifest.target
    if target == "tensorrt":
        if options.top_k is not None:
            raise UsageError("--top-k: the bundle is lowered already; lower it with --top-k")
        return source
    if target != "portable":
        raise LoweringError(
            f"{source.path} is lowered to {target}; build engines of the portable bundle it was "
            "made from"
        )
    from headport.lowering.command import Options as LowerOptions
    from headport.lowering.command import lower

    output = scratch / "lowered"
    return lower(
        LowerOptions(bundle=source.path, output=output, target="tensorrt", top_k=options.top_k)
    )


def _kept(bundle: Bundle) -> list[str]:
    return [name for name in bundle.manifest.files if not name.startswith(f"{FOLDER}/")]


def _sources(bundle: Bundle, options: Options, scratch: Path) -> list[Source]:
    if options.merged:
        from headport.runtime.engine.merged import write_merged

        folder = scratch / MERGED
        folder.mkdir()
        return [Source(MERGED, *write_merged(bundle, folder))]
    return [
        Source(name, bundle.path / graph.file, graph.inputs)
        for name, graph in bundle.manifest.graphs.items()
    ]


def _chosen(options: Options, words: tuple[str, ...]) -> dict[str, Any]:
    # A bundle holds no path of the machine that made it.
    chosen = {**given_options(options), "profile": words}
    shown = {n: v.name if isinstance(v, Path) else v for n, v in chosen.items()}
    return {n: list(v) if isinstance(v, tuple) else v for n, v in shown.items()}


def _summary(record: EngineRecord) -> dict[str, Any]:
    return {
        "graph": record.graph,
        "plan": record.plan,
        "bytes": record.plan_bytes,
        "sha256": record.plan_sha256,
        "backend": f"{record.backend} {record.backend_version}",
        "seconds": record.seconds,
        "bytes_per_weight": {w.weight: w.plan_bytes_per_element for w in record.weights},
        "weights_found": {w.weight: w.found for w in record.weights},
    }


def run(options: Options) -> Outcome:
    """Build and say what is in the plans."""
    bundle = engine(options)
    report = bundle.manifest.provenance.stages[-1].report
    text = "\n".join(_lines(bundle, report))
    return Outcome(text, {"bundle": str(options.output), **report})


def _lines(bundle: Bundle, report: dict[str, Any]) -> Iterator[str]:
    yield f"{bundle.path.name}: {len(report['plans'])} plans built, none validated"
    for plan in report["plans"]:
        yield (
            f"{plan['plan']}: {plan['bytes'] / 1e6:.1f} MB in {plan['seconds']:.1f} s by "
            f"{plan['backend']}, sha256 {plan['sha256'][:16]}…"
        )
        for weight, size in plan["bytes_per_weight"].items():
            found = "found in it" if plan["weights_found"][weight] else "not found in it as stored"
            yield f"  {weight}: {size:.3f} bytes of plan per weight, its bytes {found}"
    yield "run `headport gpu-check` on a machine with their GPU before you rely on them"
