"""Parity table of causal-LM families: `python -m benchmarks.families [--only NAME …] [--dtype …]`.

Every tiny configuration of `benchmarks.zoo` is saved as a checkpoint, exported, lowered to
ort-cpu, and run in several ways; each way is compared with transformers' own eager attention in
float32, one row at a time and without a cache. Nothing of the product's own checks is used.
Exit 1 if a row fails, if a family that must be refused is not, or if the control is not noticed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.zoo import REFUSED, ZOO, Family, save_checkpoint
from headport.bundle import Bundle
from headport.errors import HeadportError
from headport.runner import Runner, open_runner
from headport.session import open_session

__all__ = [
    "BARS",
    "CASES",
    "Row",
    "control",
    "errors_of",
    "main",
    "measure",
    "reference_logits",
    "refusal",
    "rows_of",
]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

BARS = {"fp32": 2e-4, "fp16": 2e-2}  # of the largest |logit| of the reference
_LENGTHS = (40, 5, 17, 12)  # tokens per row; the first is five windows long
_STEPS = 5  # tokens decoded one by one
_CHUNK = 7


@dataclass(frozen=True)
class Row:
    """One configuration, dtype and target."""

    name: str
    dtype: str
    target: str
    shows: str
    max_logit: float = 0.0  # largest |logit| of the reference
    errors: dict[str, float] = field(default_factory=dict)  # case → max |Δlogit| / max |logit|
    experts: str = ""  # operator that computes routed experts
    failure: str = ""

    def __bool__(self) -> bool:
        return bool(self.errors) and not self.failure and self.worst <= BARS[self.dtype]

    @property
    def worst(self) -> float:
        """Largest error over the cases."""
        return max(self.errors.values(), default=np.inf)


def rows_of(vocab_size: int) -> list[Int64]:
    """The token ids that are run, one array per row."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab_size, n) for n in _LENGTHS]


def reference_logits(checkpoint: Path, implementation: str, rows: list[Int64]) -> list[Float32]:
    """Logits of transformers' own model, per row [n, V]; each row alone, without a cache."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation=implementation, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        return [model(input_ids=torch.from_numpy(row)[None]).logits[0].numpy() for row in rows]


def _run(runner: Runner, rows: Sequence[Int64], cuts: Sequence[Int64]) -> list[Float32]:
    # cuts[i][b]: tokens that row b holds after step i, right-padded to the longest step.
    cache = runner.new_cache(len(rows), max(len(row) for row in rows))
    found: list[list[Float32]] = [[] for _ in rows]
    seen = np.zeros(len(rows), np.int64)
    for cut in cuts:
        new = cut - seen
        ids = np.zeros((len(rows), max(1, int(new.max()))), np.int64)
        for b, row in enumerate(rows):
            ids[b, : new[b]] = row[seen[b] : cut[b]]
        states = runner.forward(cache, ids, new)
        for b, n in enumerate(new):
            found[b].append(states[b, :n])
        seen = cut
    return [np.concatenate(parts) for parts in found]


def _prefill(runner: Runner, rows: list[Int64]) -> list[Float32]:
    return [_run(runner, [row], [np.array([len(row)])])[0] for row in rows]


def _decode(runner: Runner, rows: list[Int64]) -> list[Float32]:
    return [_run(runner, [row], [np.array([n]) for n in range(1, len(row) + 1)])[0] for row in rows]


def _ragged(runner: Runner, rows: list[Int64]) -> list[Float32]:
    lengths = np.array([len(row) for row in rows])
    return _run(runner, rows, [lengths - _STEPS + i for i in range(_STEPS + 1)])


def _chunks(runner: Runner, rows: list[Int64]) -> list[Float32]:
    lengths = np.array([len(row) for row in rows])
    steps = range(_CHUNK, int(lengths.max()) + _CHUNK, _CHUNK)
    return _run(runner, rows, [np.minimum(lengths, n) for n in steps])


CASES: dict[str, Callable[[Runner, list[Int64]], list[Float32]]] = {
    "prefill": _prefill,  # past = 0, longer than a window
    "decode": _decode,  # one token at a time from the first
    "right": _ragged,  # a ragged batch, right-padded, then decode
    "chunks": _chunks,  # a ragged batch in pieces, across windows
}


def _left(bundle: Bundle, rows: list[Int64]) -> list[Float32]:
    # A ragged batch, left-padded, then decode: the portable graph as other runtimes call it.
    backbone = next(g for g in bundle.manifest.graphs.values() if g.role == "backbone")
    session = open_session(bundle.path / backbone.file, bundle.manifest.session_options)
    prompts = [len(row) - _STEPS for row in rows]
    width = max(prompts)
    ids, mask = (np.zeros((len(rows), width), np.int64) for _ in range(2))
    for b, (row, n) in enumerate(zip(rows, prompts, strict=True)):
        ids[b, width - n :], mask[b, width - n :] = row[:n], 1
    past: dict[str, npt.NDArray[Any]] = {
        port.name: np.zeros(
            [n if isinstance(n, int) else {"batch": len(rows)}.get(n, 0) for n in port.shape],
            session.dtype(port.name),
        )
        for port in backbone.inputs
        if port.name.startswith("past")
    }
    found: list[list[Float32]] = [[] for _ in rows]
    for step in range(_STEPS + 1):
        values = session.run({"input_ids": ids, "attention_mask": mask, **past})
        states = values["hidden_states"].astype(np.float32)
        for b, n in enumerate(prompts):
            found[b].append(states[b, width - n :] if step == 0 else states[b])
        past = {
            name: values[name.replace("past_key_values", "present").replace("past_", "present_")]
            for name in past
        }
        if step < _STEPS:
            ids = np.array([[row[n + step]] for row, n in zip(rows, prompts, strict=True)])
            mask = np.concatenate([mask, np.ones((len(rows), 1), np.int64)], axis=1)
    return [np.concatenate(parts) for parts in found]


def errors_of(bundle: Bundle, rows: list[Int64], expected: list[Float32]) -> dict[str, float]:
    """Case → max |Δlogit| / max |logit| of a bundle as it runs."""
    largest = max(float(np.abs(logits).max()) for logits in expected)
    runner = open_runner(bundle)
    hidden = {case: run(runner, rows) for case, run in CASES.items()}
    if bundle.manifest.target == "portable":
        hidden["left"] = _left(bundle, rows)
    found: dict[str, float] = {}
    for case, states in hidden.items():
        worst = 0.0
        for own, logits in zip(states, expected, strict=True):
            given = runner.head(np.ascontiguousarray(own)).logits
            assert given is not None
            worst = max(worst, float(np.nan_to_num(np.abs(given - logits), nan=np.inf).max()))
        found[case] = worst / largest
    return found


def _experts(bundle: Bundle) -> str:
    from headport.graphs import load_graphs

    graph = load_graphs(bundle)["backbone"].graph
    names = {
        n.op_type.split("_")[0] for n in graph if "MixtureOf" in n.op_type or n.op_type == "MoE"
    }
    return ", ".join(sorted(names))


def measure(
    family: Family, dtype: Literal["fp32", "fp16"], targets: Sequence[str], folder: Path
) -> list[Row]:
    """Export one configuration, lower it, and run both in every way."""
    from headport.export import Options, export
    from headport.lowering import Options as LowerOptions
    from headport.lowering import lower

    checkpoint = save_checkpoint(family, folder / "checkpoint")
    rows, done = rows_of(family.settings["vocab_size"]), []
    expected = reference_logits(checkpoint, family.reference, rows)
    largest = max(float(np.abs(logits).max()) for logits in expected)
    bundle: Bundle | None = None
    for target in targets:
        row = Row(family.name, dtype, target, family.shows, largest)
        try:
            if bundle is None:
                bundle = export(
                    Options(model=str(checkpoint), output=folder / "portable", dtype=dtype)
                )
            if target != "portable":
                bundle = lower(
                    LowerOptions(bundle=bundle.path, output=folder / target, target="ort-cpu")
                )
            found = errors_of(bundle, rows, expected)
            done.append(_with(row, errors=found, experts=_experts(bundle)))
        except HeadportError as error:
            done.append(_with(row, failure=f"{type(error).__name__}: {error}"))
            break
    return done


def _with(row: Row, **changes: Any) -> Row:
    return Row(**(asdict(row) | changes))


def refusal(refused: Any, folder: Path) -> tuple[bool, str]:
    """Whether a configuration is refused as it must be, and the message."""
    from headport.export import Options, export

    try:
        checkpoint = save_checkpoint(refused, folder / "checkpoint")
        export(Options(model=str(checkpoint), output=folder / "bundle"))
    except HeadportError as error:
        written = (folder / "bundle").exists()
        return refused.says in str(error) and not written, str(error)
    return False, "exported"


def control(folder: Path) -> tuple[bool, str]:
    """Whether windows that are off by one are noticed, and how far off the logits are."""
    import onnx_ir as ir

    from headport.export import Options, export
    from headport.graphs import load_graphs, write_graphs

    family = next(f for f in ZOO if f.name == "mistral")
    checkpoint = save_checkpoint(family, folder / "checkpoint")
    rows = rows_of(family.settings["vocab_size"])
    expected = reference_logits(checkpoint, family.reference, rows)
    bundle = export(Options(model=str(checkpoint), output=folder / "bundle"))
    found = []
    for by in (-1, 1):
        graphs = load_graphs(bundle)
        for node in graphs["backbone"].graph:
            if "window" in node.attributes:
                window = node.attributes["window"].as_int() + by
                node.attributes["window"] = ir.AttrInt64("window", window)
        damaged = folder / f"window{by:+d}"
        damaged.mkdir()
        files = {name: graph.file for name, graph in bundle.manifest.graphs.items()}
        write_graphs(graphs, files, damaged)
        found.append(min(errors_of(Bundle(damaged, bundle.manifest), rows, expected).values()))
    noticed = min(found) > 10 * BARS["fp16"]
    return noticed, f"windows −1 and +1: errors {found[0]:.2g} and {found[1]:.2g}"


def _print(row: Row) -> None:
    cells = " ".join(f"{case} {error:.1e}" for case, error in row.errors.items())
    verdict = "ok  " if row else "FAIL"
    text = row.failure or f"{cells}  max|logit| {row.max_logit:.1f} {row.experts}"
    print(f"{verdict} {row.name:18s} {row.dtype} {row.target:8s} {text}", flush=True)


def _names(chosen: list[str] | None, known: Sequence[str]) -> list[str]:
    unknown = sorted(set(chosen or ()) - set(known))
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return list(chosen or known)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = [f.name for f in ZOO] + [r.name for r in REFUSED] + ["control"]
    parser.add_argument("--only", nargs="+", metavar="NAME", help="families, refusals or control")
    parser.add_argument("--dtype", nargs="+", choices=list(BARS), default=list(BARS))
    parser.add_argument(
        "--target", nargs="+", choices=["portable", "ort-cpu"], default=["portable", "ort-cpu"]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    options = parser.parse_args(arguments)
    names, started = _names(options.only, known), time.monotonic()
    rows: list[Row] = []
    refusals: dict[str, str] = {}
    ok = True
    for family in (f for f in ZOO if f.name in names):
        for dtype in options.dtype:
            if family.routed and dtype == "fp16":
                # A rank among experts may flip by rounding, which is no error of either program.
                print(f"skip {family.name:18s} fp16 routed: compared in fp32", flush=True)
                continue
            with tempfile.TemporaryDirectory() as folder:
                for row in measure(family, dtype, options.target, Path(folder)):
                    _print(row)
                    rows.append(row)
    for refused in (r for r in REFUSED if r.name in names):
        with tempfile.TemporaryDirectory() as folder:
            right, message = refusal(refused, Path(folder))
        print(f"{'refused' if right else 'FAIL   '} {refused.name:18s} {message}", flush=True)
        refusals[refused.name] = message
        ok &= right
    if "control" in names:
        with tempfile.TemporaryDirectory() as folder:
            noticed, message = control(Path(folder))
        print(f"{'noticed' if noticed else 'FAIL   '} control: {message}", flush=True)
        ok &= noticed
    failed = [row for row in rows if not row]
    print(
        f"{len({row.name for row in rows})} configurations, {len(rows)} rows, {len(failed)} "
        f"failed, {len(refusals)} refused, {time.monotonic() - started:.0f} s"
    )
    if options.json:
        found = {"rows": [asdict(row) | {"ok": bool(row)} for row in rows], "refused": refusals}
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0 if ok and not failed and (rows or refusals or "control" in names) else 1


if __name__ == "__main__":
    sys.exit(main())
