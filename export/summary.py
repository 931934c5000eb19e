"""What an export made and measured, as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headport.bundle import Bundle
from headport.head_lines import task_head_lines
from headport.manifest import Manifest

__all__ = ["summary"]


def summary(bundle: Bundle) -> str:
    """The lines of a bundle that was just exported."""
    report = bundle.manifest.provenance.stages[-1].report
    parity, cases = report["parity"], report["parity"]["cases"]
    lines = [
        f"{bundle.path.name}: {_model(bundle.manifest)}",
        f"tensors {report['tensor_bytes'] / 1e6:.1f} MB for "
        f"{report['parameter_bytes'] / 1e6:.1f} MB of parameters, {_road(report['weights'])}",
        *_leftovers(report),
        *_adapter(report),
        *(
            f"head {name}: {line}"
            for name, head in bundle.manifest.task_heads.items()
            for line in task_head_lines(name, head)
        ),
    ]
    if cases:
        lines.append(
            f"parity with PyTorch: max |Δlogit| {max(cases.values()):.2g} over {len(cases)} ways "
            f"to run it (accepted {parity['limit']:.2g}), the backbone {_pieces(parity['pieces'])}"
        )
    lines += [_head_parity(name, found) for name, found in parity["heads"].items()]
    return "\n".join(lines)


def _model(manifest: Manifest) -> str:
    model = manifest.model
    parts = [model.architecture, model.dtype, f"{model.layers} layers"]
    parts.append(f"vocabulary {manifest.vocabulary.padded_size}")
    parts += [
        f"head {'' if name == 'lm' else f'{name} '}{'tied' if head.tied else 'untied'}"
        for name, head in manifest.heads.items()
    ]
    return ", ".join(parts)


def _road(weights: dict[str, Any]) -> str:
    if weights["name"] == "streamed":
        return "streamed from the checkpoint's files"
    return f"loaded as a whole ({weights['reason']})"


def _leftovers(report: dict[str, Any]) -> Iterator[str]:
    unused = report["weights"]["unused"]
    if unused:
        yield f"tensors of the checkpoint that the model does not use: {', '.join(unused)}"
    idle = report["parameters_in_no_graph"]
    if idle:
        yield f"parameters that no logit depends on, left out: {', '.join(idle)}"


def _adapter(report: dict[str, Any]) -> Iterator[str]:
    found = report.get("adapter")
    if found is not None and "tokens" in found:
        yield (
            f"adapter {found['name']} (sha256 {found['sha256'][:16]}…), {found['type']}: every "
            f"sequence begins with its {found['tokens']} learnt tokens"
        )
    elif found is not None:
        ranks = ", ".join(map(str, found["ranks"]))
        whole = f", {len(found['whole'])} weights taken whole" if found["whole"] else ""
        yield (
            f"adapter {found['name']} (sha256 {found['sha256'][:16]}…) merged into "
            f"{found['layers']} layers, rank {ranks}{whole}"
        )


def _pieces(count: int) -> str:
    return "as a whole" if count == 1 else f"in {count} pieces, one after the other"


def _head_parity(name: str, parity: dict[str, Any]) -> str:
    same, sums = parity["same_choice"], parity["sum_error"]
    choice = "" if same is None else f", same best score at {same:.1%} of positions"
    total = "" if sums is None else f", probabilities sum to 1 ± {sums:.1g}"
    return (
        f"head {name}, parity with PyTorch: max |Δ| {max(parity['cases'].values()):.2g} over "
        f"{len(parity['cases'])} ways to run it (accepted {parity['limit']:.2g}){choice}{total}"
    )
