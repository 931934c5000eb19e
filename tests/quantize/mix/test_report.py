"""The table of a mix, from figures that can be added up by hand."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from headport.quantize.mix.reading import Drift
from headport.quantize.mix.report import (
    GroupRow,
    MixFigures,
    MixReport,
    render_markdown,
    terminal_lines,
)


def _drift(kl: float) -> Drift:
    return Drift(100, kl, kl / 10, 1 + kl, kl / 10, 0.9)


def _row(label: str, megabytes: int, kl: float, chosen: bool) -> GroupRow:
    return GroupRow(label, (label,), 2, megabytes * 10**6, _drift(kl), chosen)


REPORT = MixReport(
    bundle="b",
    checkpoint="c",
    formats=("int4:64", "int8:64"),
    budget={"of": "ppl", "limit": 1.02},
    met=True,
    groups=(_row("m.*.q 0-1", 4, 0.02, True), _row("m.*.v 0-1", 1, 0.5, False)),
    chosen=MixFigures(1, 6 * 10**6, _drift(0.04), _drift(0.05)),
    all_small=MixFigures(2, 5 * 10**6, _drift(0.6), _drift(0.7)),
    all_large=MixFigures(0, 10 * 10**6, _drift(0.01), _drift(0.01)),
    sum_of_parts=0.03,
    held_out_mixes=1,
    own_kl=1e-11,
    options={"backbone": "int8"},
    command="headport quantize b -o b-mix --backbone int8",
    texts=[{"name": "a|b.txt", "sha256": "0123456789abcdef" * 4}],
    held_out=[],
    threads=1,
    machine="x",
    onnxruntime="1",
    seconds=2.0,
)


def _lines(report: MixReport) -> list[str]:
    return list(terminal_lines(msgspec.to_builtins(report)))


def test_columns_add_up() -> None:
    head, first, second, *rest = _lines(REPORT)
    assert head.split()[-6:] == ["to", "here", "sum", "of", "KL", "format"]
    # Saved, KL alone, its error, perplexity, KL / MB, all MB then, 0.01 + KL so far.
    assert first.split()[3:] == [
        *("4.00", "2.00e-02", "2e-03", "1.0200", "5.0e-03", "6.0", "3.0e-02", "int4:64")
    ]
    assert second.split()[3:] == [
        *("1.00", "5.00e-01", "5e-02", "1.5000", "5.0e-01", "5.0", "5.3e-01", "int8:64")
    ]
    text = "\n".join(rest)
    assert "the mix (int4:64 for 1 of 2 groups): 6.0 MB; text: KL 4.00e-02" in text
    assert "sum of parts 3.00e-02, measured as a whole on the same text 4.00e-02" in text
    assert "budget perplexity × 1.02: met" in text
    assert "the held-out text had no part in the choice" in text
    assert "a|b.txt (sha256 0123456789ab); held out: 100 of the second half of each" in text
    assert rest[-1] == "headport quantize b -o b-mix --backbone int8"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"met": False}, "NOT met by any mix; this is the nearest"),
        ({"held_out_mixes": 3}, "3 mixes were held against the held-out text before this one"),
        ({"command": None}, "nothing to quantise: every matrix stays as it is"),
        ({"budget": {"of": "bytes", "limit": 6e7}}, "budget 60,000,000 bytes of matrices"),
        ({"budget": {"of": "kl", "limit": 0.02}}, "budget mean KL 0.02"),
        ({"held_out": [{"name": "h", "sha256": "f" * 64}]}, "100 of h (sha256 ffffffffffff)"),
    ],
)
def test_remarks(changes: dict[str, object], text: str) -> None:
    report = msgspec.structs.replace(REPORT, **changes)
    assert text in "\n".join(_lines(report))
    assert text in render_markdown(msgspec.to_builtins(report))


def test_names_break_no_table() -> None:
    rows = (replace(REPORT.groups[0], label="a|b"), REPORT.groups[1])
    page = render_markdown(
        msgspec.to_builtins(msgspec.structs.replace(REPORT, groups=rows))
    ).splitlines()
    [row] = [line for line in page if "4.00" in line and "2.00e-02" in line]
    assert row.count("|") - row.count("\\|") == len(page[2].split("|")) - 1
