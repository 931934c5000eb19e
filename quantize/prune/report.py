"""What pruning did to a bundle: the record that is kept, and its lines for a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headport.bundle import Bundle
from headport.manifest import Manifest
from headport.quantize.prune.check import PruneCheck
from headport.quantize.prune.tokenizer_check import TokenizerCheck

__all__ = ["PruneReport", "head_bytes", "summary"]


@dataclass(frozen=True)
class PruneReport:
    """What pruning did."""

    before: int  # tokens that the bundle could give
    kept: int  # K
    by_reason: dict[str, int]  # kept tokens by the first reason that holds for each
    covered: float | None  # share of the counted tokens that are kept; None without counts
    dropped: int  # tokens left out because of --drop
    head_bytes_before: int
    head_bytes_after: int
    tensor_bytes_before: int  # of the whole bundle
    tensor_bytes_after: int
    untied: bool  # the head shared its weight with the input embedding and no longer does
    tokenizer_sha256: str  # of the tokenizer that ids in counts belong to
    notes: tuple[str, ...]
    check: PruneCheck | None  # None: everything is kept, so nothing was changed
    tokenizer: TokenizerCheck | None  # None: the tokenizer stays as it is


def head_bytes(manifest: Manifest) -> int:
    """Bytes of all tensors that the heads' graphs read, each once."""
    graphs = {name for name, graph in manifest.graphs.items() if graph.role == "head"}
    return sum(
        tensor.length
        for tensor in manifest.tensors
        if graphs & {consumer.partition(":")[0] for consumer in tensor.consumers}
    )


def summary(bundle: Bundle, report: dict[str, Any]) -> str:
    """Lines for a terminal.

    Args:
        bundle: What was written.
        report: `PruneReport` as the provenance has it.
    """
    share = report["kept"] / report["before"]
    lines = [
        f"{bundle.path.name}: {report['kept']} of {report['before']} tokens kept ({share:.1%})",
        *(f"  {count:>7} {reason}" for reason, count in report["by_reason"].items()),
    ]
    if report["covered"] is not None:
        lines.append(f"they make up {report['covered']:.4%} of the counted tokens")
    if report["dropped"]:
        lines.append(f"{report['dropped']} tokens left out because of --drop")
    sizes = {key: f"{report[key] / 1e6:.1f} MB" for key in report if "_bytes_" in key}
    tied = " (the embedding, which it was tied to, stays whole)" if report["untied"] else ""
    lines += [
        f"head {sizes['head_bytes_before']} → {sizes['head_bytes_after']}{tied}",
        f"all tensors {sizes['tensor_bytes_before']} → {sizes['tensor_bytes_after']}",
    ]
    check = report["check"]
    if check is None:
        lines.append("every token is kept: nothing was changed")
    else:
        lines.append(_check_line(check))
    if report["tokenizer"] is not None:
        texts = report["tokenizer"]
        lines.append(
            f"tokenizer rewritten: of {texts['texts']} texts {texts['same']} consist of kept "
            f"tokens and are split as before, {texts['longer']} became longer, "
            f"{texts['shorter']} shorter; all read back as before"
        )
    lines += [f"note: {note}" for note in report["notes"]]
    return "\n".join(lines)


def _check_line(check: dict[str, Any]) -> str:
    how = (
        "bit by bit"
        if check["logits_bit_equal"] and check["hidden_states_bit_equal"]
        else f"up to rounding (|Δlogit| {check['max_abs_logit_error']:.1e})"
    )
    return (
        f"checked on the written files: {check['tensors']} tensors equal row by row, "
        f"{check['logits']} logits of kept tokens as before, {how}"
    )
