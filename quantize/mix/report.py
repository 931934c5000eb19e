"""What a mix was chosen from, what it costs, and how to make it: for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import msgspec

from headport.quantize.mix.reading import Drift

__all__ = ["GroupRow", "MixFigures", "MixReport", "render_markdown", "terminal_lines"]


@dataclass(frozen=True)
class GroupRow:
    """One group of matrices, and what the smaller format means for it alone."""

    label: str  # kind and layers
    patterns: tuple[str, ...]  # as `--override` takes them
    matrices: int
    bytes_saved: int  # by the smaller format
    alone: Drift  # on the text, with everything else as it is
    chosen: bool  # for the smaller format


@dataclass(frozen=True)
class MixFigures:
    """One mix as a whole."""

    groups: int  # how many have the smaller format
    nbytes: int  # of all matrices, scales included
    text: Drift
    held_out: Drift


class MixReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `headport mix` measured and chose; `groups` cheapest first."""

    bundle: str
    checkpoint: str
    formats: tuple[str, str]  # smaller, larger
    budget: dict[str, Any]  # of what, and its limit
    met: bool  # by the chosen mix, on both texts
    groups: tuple[GroupRow, ...]
    chosen: MixFigures
    all_small: MixFigures
    all_large: MixFigures
    sum_of_parts: float  # nats: mean KL of all larger, plus that of each chosen group alone
    held_out_mixes: int  # how many mixes were held against the held-out text before one was chosen
    own_kl: float  # nats, of the measurement with nothing rounded
    options: dict[str, Any]  # of `headport quantize`
    command: str | None  # None: every matrix stays as it is
    texts: list[dict[str, str]]
    held_out: list[dict[str, str]]  # empty: the second half of each text
    threads: int
    machine: str
    onnxruntime: str
    seconds: float


_COLUMNS = (
    *("group", "matrices", "saved MB", "KL alone", "±", "PPL × alone", "KL / MB"),
    *("MB to here", "sum of KL", "format"),
)
_LIMITS = {
    "kl": "mean KL {:.3g}",
    "ppl": "perplexity × {:.5g}",
    "bytes": "{:,.0f} bytes of matrices",
}


def terminal_lines(report: dict[str, Any]) -> Iterator[str]:
    """An aligned table of the groups, the mix as a whole, and the command."""
    rows = [_COLUMNS, *_rows(report)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(_COLUMNS))]
    for row in rows:
        first, *middle, last = row
        cells = (cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True))
        yield "  ".join((first.ljust(widths[0]), *cells, last))
    yield ""
    for title, words in _wholes(report):
        yield f"{title + ':':<{_width(report)}} {words}"
    yield ""
    yield from _remarks(report)
    yield ""
    yield report["command"] or "nothing to quantise: every matrix stays as it is"


def render_markdown(report: dict[str, Any]) -> str:
    """The same as a page."""
    lines = [f"# Mix of {' and '.join(report['formats'])}", ""]
    lines += ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    for name, *cells in _rows(report):
        shown = name.replace("|", "\\|")  # a table's own rule, also inside code
        lines.append("| " + " | ".join((f"`{shown}`", *cells)) + " |")
    lines += ["", "| mix | |", "|---|---|"]
    lines += [f"| {title} | {words} |" for title, words in _wholes(report)]
    lines += ["", *(f"- {remark}" for remark in _remarks(report)), ""]
    command = report["command"] or "nothing to quantise: every matrix stays as it is"
    return "\n".join([*lines, "```sh", command, "```", ""])


def _rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Groups, cheapest first; the last columns are of the mix that ends with the row."""
    small, large = report["formats"]
    saved = accumulate(row["bytes_saved"] for row in report["groups"])
    first = report["all_large"]["text"]["kl_mean"]
    kl = accumulate((row["alone"]["kl_mean"] for row in report["groups"]), initial=first)
    return [
        (
            row["label"],
            str(row["matrices"]),
            f"{row['bytes_saved'] / 1e6:.2f}",
            f"{row['alone']['kl_mean']:.2e}",
            f"{row['alone']['kl_error']:.0e}",
            f"{row['alone']['perplexity_ratio']:.4f}",
            f"{1e6 * row['alone']['kl_mean'] / row['bytes_saved']:.1e}",
            f"{(report['all_large']['nbytes'] - so_far) / 1e6:.1f}",
            f"{added:.1e}",
            small if row["chosen"] else large,
        )
        for row, so_far, added in zip(report["groups"], saved, islice(kl, 1, None), strict=True)
    ]


def _width(report: dict[str, Any]) -> int:
    return max(len(title) for title, _ in _wholes(report)) + 1


def _wholes(report: dict[str, Any]) -> list[tuple[str, str]]:
    small, large = report["formats"]
    mixes = {
        f"the mix ({small} for {report['chosen']['groups']} of {len(report['groups'])} groups)": (
            report["chosen"]
        ),
        f"all {small}": report["all_small"],
        f"all {large}": report["all_large"],
    }
    return [
        (
            title,
            f"{mix['nbytes'] / 1e6:.1f} MB; text: {_drift(mix['text'])}; held out: "
            f"{_drift(mix['held_out'])}",
        )
        for title, mix in mixes.items()
    ]


def _drift(drift: dict[str, Any]) -> str:
    return (
        f"KL {drift['kl_mean']:.2e} ± {drift['kl_error']:.0e}, PPL × "
        f"{drift['perplexity_ratio']:.4f} ± {drift['perplexity_error']:.4f}, "
        f"top-1 {drift['top1_agreement']:.1%}"
    )


def _remarks(report: dict[str, Any]) -> Iterator[str]:
    chosen = report["chosen"]
    limit = _LIMITS[report["budget"]["of"]].format(report["budget"]["limit"])
    if report["met"]:
        yield f"budget {limit}: met"
    else:
        yield f"budget {limit}: NOT met by any mix; this is the nearest"
    yield (
        f"sum of parts {report['sum_of_parts']:.2e}, measured as a whole on the same text "
        f"{chosen['text']['kl_mean']:.2e} (mean KL, nats)"
    )
    yield (
        f"{report['held_out_mixes']} mixes were held against the held-out text before this one was "
        "chosen"
        if report["held_out_mixes"] > 1
        else "the held-out text had no part in the choice"
    )
    texts = ", ".join(_named(each) for each in report["texts"])
    others = ", ".join(_named(each) for each in report["held_out"]) or "the second half of each"
    yield (
        f"{chosen['text']['positions']} positions of {texts}; held out: "
        f"{chosen['held_out']['positions']} of {others}; ± is one standard error"
    )
    yield (
        "weights alone are rounded, not what kernels round besides; measured with nothing "
        f"rounded: KL {report['own_kl']:.0e}; nothing is drawn at random; ONNX Runtime "
        f"{report['onnxruntime']}, {report['threads']} threads, {report['machine']}, "
        f"{report['seconds']:.0f} s"
    )


def _named(text: dict[str, str]) -> str:
    return f"{text['name']} (sha256 {text['sha256'][:12]})"
