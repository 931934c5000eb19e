"""Ways to store SmolLM2's backbone beside an INT8 head: size, drift and decode step.

`python -m benchmarks.quantise_backbone [--keep FOLDER] [--bundle BUNDLE] [--rows NAME...]` exports
the off-grid twin (or takes a portable fp32 bundle), makes each row's bundle by `headport quantize`
and `headport lower --target ort-cpu`, and compares it, as ONNX Runtime runs it, with the fp32
bundle lowered alike, on three kinds of text. A decode step takes its turn with the fp32 bundle's in
one process, on one thread, in CPU time, which holds on a busy machine. `--lowered` adds bundles
made otherwise, such as with own kernels, `--peer` models that ONNX Runtime GenAI's builder made of
the same checkpoint. Rows are kept in
`quantise_backbone.json`; the table shows all of them. The checkpoint's backbone comes from a 4-bit
file, so figures of a 4-bit backbone understate what it costs a model that was never rounded.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.material import texts, twin
from headport.bundle import Bundle
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.metrics import RowScores, score_rows
from headport.progress import say
from headport.quantize import Options, quantize
from headport.runner import Runner, open_runner
from headport.runtime.text import Tokens
from headport.session import SessionSettings, library_version, open_session

__all__ = ["main"]

_TOKENS = 3072
_WINDOW = 512  # tokens fed at once, each window behind an empty cache
_HEAD_ROWS = 64
_PAST, _STEPS, _SLICES = 64, 12, 6

# Row → options of `headport quantize`.
ROWS: dict[str, dict[str, Any]] = {
    "int8 head": {"head": "int8"},
    "fp16 + int8 head": {"backbone": "fp16", "head": "int8"},
    "int8:64 + int8 head": {"backbone": "int8", "head": "int8"},
    "int8:32 + int8 head": {"backbone": "int8", "backbone_block": 32, "head": "int8"},
    "int8:64, v_proj residual + int8 head": {
        "backbone": "int8",
        "override": ("*.v_proj=int8:residual",),
        "head": "int8",
    },
    "int8:64 residual + int8 head": {
        "backbone": "int8",
        "backbone_activations": "residual",
        "head": "int8",
    },
    "int8:64 exact + int8 head": {
        "backbone": "int8",
        "backbone_activations": "exact",
        "head": "int8",
    },
    "int8:64 + int8 embedding and head": {
        "backbone": "int8",
        "embedding": "int8",
        "head": "int8",
    },
    "int4:32 + int8 head": {"backbone": "int4", "head": "int8"},
    "int4:32 exact + int8 head": {
        "backbone": "int4",
        "backbone_activations": "exact",
        "head": "int8",
    },
    "int4:64 + int8 head": {"backbone": "int4", "backbone_block": 64, "head": "int8"},
    "int4:32 + int4 head": {"backbone": "int4", "head": "int4"},
    "int4:64 + int4 head": {"backbone": "int4", "backbone_block": 64, "head": "int4"},
    "int4:16 + int8 head": {"backbone": "int4", "backbone_block": 16, "head": "int8"},
    "int4:32, down_proj int8 + int8 head": {
        "backbone": "int4",
        "override": ("*.down_proj=int8",),
        "head": "int8",
    },
}


@dataclass(frozen=True)
class Row:
    """One way to store the backbone, as the lowered bundle runs."""

    name: str
    megabytes: float  # of all tensors on disk, lowered
    backbone_megabytes: float
    perplexity_ratio: float
    kl_mean: float  # nats
    top1_agreement: float
    tokens: int
    decode_ms: float | None  # backbone and head, CPU time of one thread, first quartile
    decode_ratio: float | None  # to the fp32 bundle, in turns with it


def main(arguments: list[str] | None = None) -> int:
    """Measure what is asked for and print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.quantise_backbone", description=__doc__)
    parser.add_argument("--keep", type=Path, default=Path("out/quantise_backbone"))
    parser.add_argument("--bundle", type=Path, help="portable fp32 bundle; default: the twin")
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--tokens", type=int, default=_TOKENS)
    parser.add_argument(
        "--lowered", nargs="*", type=Path, default=[], help="bundles that are lowered already"
    )
    parser.add_argument(
        "--peer",
        nargs="*",
        type=Path,
        default=[],
        help="folders with the model.onnx that ONNX Runtime GenAI's builder made of the model",
    )
    found = parser.parse_args(arguments)
    names = [*found.rows, *(path.name for path in (*found.lowered, *found.peer))]
    if len(set(names)) < len(names):
        parser.error("rows are called like their folders, and two of them have one name")
    folder: Path = found.keep
    folder.mkdir(parents=True, exist_ok=True)
    source = found.bundle or _exported(folder)
    reference = _lowered(source, folder / "fp32-cpu")
    material = _Material(reference, list(_windows(reference, folder, found.tokens)))
    file = folder / "quantise_backbone.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    for name in found.rows:
        say(f"{name} …")
        row = _measure(name, source, material, folder)
        known[name] = asdict(row)
        file.write_text(json.dumps(known, indent=2) + "\n")
    for path in found.lowered:
        say(f"{path.name} …")
        bundle = Bundle.open(path, verify=False)
        known[path.name] = asdict(_measure_lowered(path.name, bundle, material))
        file.write_text(json.dumps(known, indent=2) + "\n")
    for peer in found.peer:
        known[peer.name] = asdict(_measure_peer(peer, material))
        file.write_text(json.dumps(known, indent=2) + "\n")
    print(_table([Row(**row) for row in known.values()]))
    return 0


def _exported(folder: Path) -> Path:
    target = folder / "fp32"
    if not target.is_dir():
        from headport.export.command import Options as ExportOptions
        from headport.export.command import export

        say("exporting the twin …")
        export(ExportOptions(model=str(twin(folder / "twin")), output=target))
    return target


def _lowered(portable: Path, target: Path) -> Bundle:
    if not target.is_dir():
        lower(LowerOptions(bundle=portable, output=target, target="ort-cpu"))
    return Bundle.open(target, verify=False)


def _windows(bundle: Bundle, folder: Path, tokens: int) -> Iterator[npt.NDArray[np.int64]]:
    files = texts(folder / "texts", 6 * tokens)
    tokenizer = Tokens(bundle)
    for file in files:
        ids = np.array(tokenizer.encode(file.read_text(encoding="utf-8")), np.int64)
        part = ids[: tokens // len(files)]
        yield from (part[start : start + _WINDOW] for start in range(0, len(part), _WINDOW))


class _Material:
    """The texts, and the fp32 bundle's hidden states on them."""

    def __init__(self, reference: Bundle, windows: list[npt.NDArray[np.int64]]) -> None:
        self.runner = open_runner(reference, SessionSettings(threads=1))
        self.windows = windows
        self.hidden = [_hidden_states(self.runner, ids) for ids in windows]


def _hidden_states(runner: Runner, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    rows = runner.forward(runner.new_cache(1, len(ids)), ids[None], np.array([len(ids)]))
    return np.ascontiguousarray(rows[0])


def _measure(name: str, source: Path, material: _Material, folder: Path) -> Row:
    stem = "".join(c if c.isalnum() else "-" for c in name)
    portable, target = folder / stem, folder / f"{stem}-cpu"
    if not target.is_dir():
        quantize(Options(bundle=source, output=portable, force=True, **ROWS[name]))
    return _measure_lowered(name, _lowered(portable, target), material)


def _measure_lowered(name: str, bundle: Bundle, material: _Material) -> Row:
    runner = open_runner(bundle, SessionSettings(threads=1))

    def logits(ids: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.float32]]:
        hidden = _hidden_states(runner, ids)
        for start in range(0, len(ids) - 1, _HEAD_ROWS):
            found = runner.head(hidden[start : start + _HEAD_ROWS]).logits
            assert found is not None
            yield found

    before, after = _decode([material.runner, runner], material.windows[0])
    tensors = bundle.manifest.tensors
    backbone = [t for t in tensors if any(c.startswith("backbone:") for c in t.consumers)]
    return Row(
        name=name,
        megabytes=sum(t.length for t in tensors) / 1e6,
        backbone_megabytes=sum(t.length for t in backbone) / 1e6,
        **_drift(logits, material),
        decode_ms=1e3 * after,
        decode_ratio=after / before,
    )


def _measure_peer(folder: Path, material: _Material) -> Row:
    """A model.onnx of one graph, token ids to logits, under ONNX Runtime's default options."""
    session = open_session(folder / "model.onnx", {}, SessionSettings(threads=1))
    # The graph only names this size.
    config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    size = config["model"]["decoder"]["head_size"]

    def logits(ids: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.float32]]:
        feeds: dict[str, npt.NDArray[Any]] = {
            "input_ids": ids[None],
            "attention_mask": np.ones((1, len(ids)), np.int64),
            "position_ids": np.arange(len(ids))[None],
        }
        for name in session.inputs:
            if name.startswith("past_key_values."):
                heads = session.shape(name)[1]
                assert isinstance(heads, int)
                feeds[name] = np.zeros((1, heads, 0, size), session.dtype(name))
        found = session.run({n: feeds[n] for n in session.inputs}, ["logits"])["logits"][0]
        for start in range(0, len(ids) - 1, _HEAD_ROWS):
            yield found[start : start + _HEAD_ROWS].astype(np.float32)

    stored = sum(file.stat().st_size for file in folder.glob("model.onnx*"))
    drift = _drift(logits, material)
    return Row(folder.name, stored / 1e6, float("nan"), **drift, decode_ms=None, decode_ratio=None)


def _drift(
    logits: Callable[[npt.NDArray[np.int64]], Iterator[npt.NDArray[np.float32]]],
    material: _Material,
) -> dict[str, Any]:
    scores = RowScores.concatenate(list(_scores(logits, material)))
    drift = float((scores.nll_candidate - scores.nll_reference).mean())
    return {
        "perplexity_ratio": float(np.exp(drift)),
        "kl_mean": float(scores.kl.mean()),
        "top1_agreement": float(scores.agreement[:, 0].mean()),
        "tokens": len(scores),
    }


def _scores(
    logits: Callable[[npt.NDArray[np.int64]], Iterator[npt.NDArray[np.float32]]],
    material: _Material,
) -> Iterator[RowScores]:
    for ids, reference in zip(material.windows, material.hidden, strict=True):
        for start, found in zip(range(0, len(ids) - 1, _HEAD_ROWS), logits(ids), strict=True):
            rows = slice(start, min(start + _HEAD_ROWS, len(ids) - 1))
            expected = material.runner.head(reference[rows]).logits
            assert expected is not None
            targets = ids[rows.start + 1 : rows.stop + 1]
            yield score_rows(expected, found[: len(targets)], targets, np.zeros(len(targets)))


def _decode(runners: list[Runner], ids: npt.NDArray[np.int64]) -> tuple[float, float]:
    seconds: list[list[float]] = [[], []]
    ids = np.resize(ids, (1, _PAST + _STEPS))
    one = np.array([1])
    for _ in range(_SLICES):
        for runner, found in zip(runners, seconds, strict=True):
            cache = runner.new_cache(1, _PAST + _STEPS)
            runner.forward(cache, ids[:, :_PAST], np.array([_PAST]))
            for step in range(_PAST, _PAST + _STEPS):
                start = time.process_time()
                runner.head(runner.forward(cache, ids[:, step, None], one)[:, 0])
                if step >= _PAST + 2:  # the first ones find caches cold
                    found.append(time.process_time() - start)
    before, after = (float(np.quantile(each, 0.25)) for each in seconds)
    return before, after


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _table(rows: list[Row]) -> str:
    lines = [
        "| backbone + head | tensors MB | of the backbone MB | PPL ratio | mean KL | top-1 | "
        "decode ms | × fp32 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.megabytes:.0f} | {r.backbone_megabytes:.0f} | "
        f"{r.perplexity_ratio:.4f} | {r.kl_mean:.1e} | {r.top1_agreement:.1%} | "
        f"{_number(r.decode_ms, 1)} | {_number(r.decode_ratio, 2)} |"
        for r in rows
    ]
    counts = sorted({r.tokens for r in rows})
    lines.append(
        f"\n{', '.join(map(str, counts))} positions of code, prose and medical terms; decode: one "
        f"thread, CPU time, past {_PAST}; ONNX Runtime {library_version()}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
