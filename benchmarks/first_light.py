"""Fidelity of the written bundles of SmolLM2-135M against PyTorch, as ONNX Runtime runs them.

`python -m benchmarks.first_light [--keep FOLDER]` exports the model and its off-grid twin,
validates fp32 and INT8-head bundles, portable and lowered, and decodes one token at a time behind
a past longer than 1,024 tokens. Prints a table and writes `first_light.json` into the folder.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.material import smollm2, texts, twin
from benchmarks.tree import Measured, run_measured
from headport.bundle import Bundle
from headport.runner import open_runner

__all__ = ["main"]

_METRICS = (
    *("top1_agreement", "top1_agreement_tie_adjusted", "top10_agreement"),
    *("perplexity_ratio", "kl_mean", "kl_max", "max_abs_logit_error"),
)
_PAST, _STEPS = 1100, 256  # tokens before, and one-by-one decode steps


@dataclass(frozen=True)
class Row:
    """One bundle: its stages, what it measures against PyTorch, its size."""

    name: str
    checkpoint: str
    stages: tuple[tuple[str, ...], ...]  # after export, each as arguments of a verb


_RESIDUAL = ("quantize", "--head", "int8", "--block", "64")
_ROUNDED = (*_RESIDUAL, "--activations", "rounded")
_LOWER = ("lower", "--target", "ort-cpu")
ROWS = (
    Row("fp32, portable", "smollm2", ()),
    Row("fp32, ort-cpu", "smollm2", (_LOWER,)),
    Row("int8 head, portable (exact activations)", "twin", (_RESIDUAL,)),
    Row("int8 head residual, ort-cpu", "twin", (_RESIDUAL, _LOWER)),
    Row("int8 head rounded, ort-cpu", "twin", (_ROUNDED, _LOWER)),
)


def _must(measured: Measured) -> Measured:
    if measured.exit_code != 0:
        raise SystemExit(f"{measured.command}\nexit {measured.exit_code}\n{measured.output}")
    return measured


def _bundle(row: Row, exported: Path, folder: Path) -> Path:
    source = exported
    for stage in row.stages:
        target = folder / "-".join([source.name, *(s.strip("-") for s in stage)])
        if not target.exists():
            _must(run_measured(stage[0], str(source), "-o", str(target), *stage[1:]))
        source = target
    return source


def _decode_error(model: str, bundle: Path, text: Path) -> float:
    """Max |Δlogit| of one-by-one decode behind a long past, teacher-forced, against PyTorch."""
    import torch

    from headport.export.checkpoint import find_checkpoint, load_model, load_tokenizer

    checkpoint = find_checkpoint(model)
    ids = load_tokenizer(checkpoint)(text.read_text(encoding="utf-8"))["input_ids"]
    ids = np.array(ids[: _PAST + _STEPS], np.int64)
    assert len(ids) == _PAST + _STEPS
    with torch.no_grad():
        reference = load_model(checkpoint)(torch.from_numpy(ids)[None], use_cache=False)
    expected = reference.logits[0, _PAST:].float().numpy()
    runner = open_runner(Bundle.open(bundle))
    cache = runner.new_cache(1, len(ids))
    runner.forward(cache, ids[None, :_PAST], np.array([_PAST]))
    worst = 0.0
    for step in range(_STEPS):
        hidden = runner.forward(cache, ids[None, _PAST + step, None], np.array([1]))
        logits = runner.head(hidden[:, 0]).logits
        assert logits is not None
        worst = max(worst, float(np.abs(logits[0] - expected[step]).max()))
    return worst


def _validate(model: str, bundle: Path, files: list[Path], folder: Path) -> Any:
    report = folder / f"{bundle.name}.json"
    run = run_measured(
        *("validate", str(bundle), "--reference", model, "--text", *map(str, files)),
        *("--json", str(report), "--quiet"),
    )
    if run.exit_code not in (0, 1):
        _must(run)
    return json.loads(report.read_text()) | {"seconds": run.seconds, "exit_code": run.exit_code}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; exit 1 if any row's default gates fail."""
    parser = argparse.ArgumentParser(prog="benchmarks.first_light", description=__doc__)
    parser.add_argument("--keep", type=Path, default=Path("out/first_light"), metavar="FOLDER")
    folder = parser.parse_args(arguments).keep
    files = texts(folder / "texts")
    long_text = texts(folder / "long", characters=12_000)[1]
    models = {"smollm2": str(smollm2()), "twin": str(twin(folder / "twin-checkpoint"))}
    exports: dict[str, Measured] = {}
    for name, model in models.items():
        target = folder / name
        if not target.exists():
            exports[name] = _must(run_measured("export", model, "-o", str(target)))
    found = []
    for row in ROWS:
        bundle = _bundle(row, folder / f"{row.checkpoint}", folder)
        report = _validate(models[row.checkpoint], bundle, files, folder)
        decode = _decode_error(models[row.checkpoint], bundle, long_text)
        size = sum(t.length for t in Bundle.open(bundle, verify=False).manifest.tensors)
        found.append(
            {
                **asdict(row),
                **{name: report["metrics"][name]["value"] for name in _METRICS},
                "tokens": report["tokens_scored"],
                "decode_error": decode,
                "tensor_bytes": size,
                "verdict": report["verdict"],
            }
        )
        print(_line(found[-1]), flush=True)
    for name, measured in exports.items():
        print(
            f"export {name}: {measured.seconds:.0f} s, peak {measured.peak_rss_bytes / 1e6:.0f} MB"
        )
    print(f"{platform.machine()}, Python {platform.python_version()}, {_PAST} past, {_STEPS} steps")
    (folder / "first_light.json").write_text(json.dumps(found, indent=2))
    return int(any(row["verdict"] != "passed" for row in found))


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['name']:<40} tokens {row['tokens']} top-1 {row['top1_agreement']:.4%} "
        f"(tie-adjusted {row['top1_agreement_tie_adjusted']:.4%}) "
        f"top-10 {row['top10_agreement']:.4%} PPL ratio {row['perplexity_ratio']:.6f} "
        f"KL mean {row['kl_mean']:.2e} max {row['kl_max']:.2e} "
        f"max|Δlogit| {row['max_abs_logit_error']:.2e} decode {row['decode_error']:.2e} "
        f"{row['tensor_bytes'] / 1e6:.1f} MB {row['verdict']}"
    )


if __name__ == "__main__":
    sys.exit(main())
