"""Two reports: better, worse or within noise, by intervals; other material is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headport.cli import main
from headport.errors import UsageError
from headport.validate.baseline import check_comparable
from headport.validate.changes import DECISIVE, changes
from headport.validate.report import Metric, Report
from tests.validate.reports import around, metrics, report
from tests.validate.test_baseline import release


def outcomes(before: Report, now: Report, name: str | None = None) -> dict[str, str]:
    return {c.metric: c.outcome for c in changes(before, now) if c.slice == name}


def test_paired_documents_decide() -> None:
    better = outcomes(release(4e-4), release(3e-4))
    assert better["kl_mean"] == "better" and better["top1_agreement"] == "within noise"
    assert outcomes(release(3e-4), release(4e-4))["kl_mean"] == "worse"
    noisy = outcomes(release(4e-4, documents=6), release(4e-4, spread=2e-4, documents=6))
    assert noisy["kl_mean"] == "within noise"


def test_larger_is_better_for_shares_and_worse_for_distances() -> None:
    def measured(value: float) -> Report:
        found = metrics()
        for name in ("top5_agreement", "total_variation_mean"):
            found = msgspec.structs.replace(found, **{name: around(value)})
        return release(4e-4, metrics=found)

    rising = outcomes(measured(0.5), measured(0.6))
    assert rising["top5_agreement"] == "better" and rising["total_variation_mean"] == "worse"
    still = outcomes(measured(0.5), measured(0.5 + 1e-6))
    assert still["top5_agreement"] == still["total_variation_mean"] == "within noise"


def test_perplexities_change_by_their_logarithm() -> None:
    before, now = (
        report(metrics=metrics(perplexity_candidate=value), by_document=()) for value in (20, 22)
    )
    (found,) = [
        c for c in changes(before, now) if c.metric == "perplexity_candidate" and c.slice is None
    ]
    assert found.change == pytest.approx(0.0953, abs=1e-4) and not found.paired
    assert found.outcome == "worse"


def test_without_an_interval_nothing_is_known() -> None:
    found = outcomes(report(), report(metrics=metrics(kl_reverse_mean=None)))
    assert found["kl_reverse_mean"] == "unknown"


def test_every_text_is_compared_too() -> None:
    assert {c.slice for c in changes(report(), report())} == {None, "prose"}


def top_only(found: Report) -> Report:
    return msgspec.structs.replace(
        found, protocol=msgspec.structs.replace(found.protocol, top_only=True)
    )


def test_bounds_are_not_compared() -> None:
    found = outcomes(top_only(release(4e-4)), top_only(release(3e-4)))
    assert "top1_agreement" in found and "perplexity_candidate" in found
    assert not [name for name in found if name.startswith(("kl_", "total_variation"))]


def test_bounds_do_not_stand_beside_figures() -> None:
    for pair in (top_only(release(4e-4)), release(4e-4)), (release(4e-4), top_only(release(4e-4))):
        with pytest.raises(UsageError, match="other knowledge of the reference found"):
            check_comparable(*pair, Path("a.json"))


def test_a_gate_does_not_pass_where_nothing_can_be_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    for file, kl in zip(files, (4e-4, 9.0), strict=True):
        one = release(kl, documents=1)
        blind = {n: Metric(value=getattr(one.metrics, n).value) for n in DECISIVE}
        one = msgspec.structs.replace(one, metrics=msgspec.structs.replace(one.metrics, **blind))
        Path(file).write_bytes(msgspec.json.encode(one))
    assert main(["compare", *files]) == 0
    assert "unknown" in capsys.readouterr().out
    assert main(["compare", *files, "--gate", "--quiet"]) == 1


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    for name, kl in (("a", 3e-4), ("b", 4e-4)):
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(release(kl)))
    return str(tmp_path / "a.json"), str(tmp_path / "b.json")


def test_the_verb(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(files[0]).with_name("both.html")
    document = page.with_suffix(".json")
    assert main(["compare", *files, "-o", str(page), "--json", str(document)]) == 0
    out = capsys.readouterr().out
    assert "worse" in out and "All texts" in out and "Text prose" in out and "paired" in out
    assert "<td>worse</td>" in page.read_text(encoding="utf-8")
    assert json.loads(document.read_text())["changes"][0]["outcome"] == "worse"
    assert main(["compare", *files, "--gate", "--quiet"]) == 1
    assert main(["compare", files[1], files[0], "--gate", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("change", "more", "says"),
    [
        ({"tokens_scored": 41}, (), "other tokens found"),
        ({}, ("-o", "a.pdf"), "ends in .md or .html"),
    ],
)
def test_wrong_use_is_refused(
    change: dict[str, Any],
    more: tuple[str, ...],
    says: str,
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path(files[1]).write_bytes(msgspec.json.encode(release(4e-4, **change)))
    assert main(["compare", *files, *more]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
