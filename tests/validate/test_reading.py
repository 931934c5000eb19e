"""Reports of every schema version open; whatever else is called a report gets one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headport.errors import UsageError
from headport.validate.markdown import render_markdown
from headport.validate.reading import read_report
from headport.validate.report import REPORT_SCHEMA_VERSION
from tests.validate.reports import report

# As the releases of these schema versions wrote them.
OLD = Path(__file__).with_name("old_reports")


def written(folder: Path, document: Any) -> Path:
    file = folder / "report.json"
    file.write_bytes(msgspec.json.encode(document))
    return file


def test_a_report_of_this_version_is_read_as_it_was(tmp_path: Path) -> None:
    assert read_report(written(tmp_path, report())) == report()


@pytest.mark.parametrize("version", range(1, REPORT_SCHEMA_VERSION))
def test_old_versions_open_and_render(version: int) -> None:
    found = read_report(OLD / f"version-{version}.json")
    assert found.schema_version == REPORT_SCHEMA_VERSION
    assert found.verdict == "passed" and found.metrics.kl_mean.value == 4e-4
    assert found.metrics.kl_p99_9.value == (None if version == 1 else 0.5)
    assert (found.distributions is None) == (found.worst[0].reference_top == ()) == (version < 4)
    assert not found.protocol.top_only
    if version > 1:
        assert found.flips.within_noise == 1 and (found.flips.noise is None) == (version < 4)
        assert found.attribution is not None and found.attribution.largest == "head"
    assert "passed" in render_markdown(found)


def test_an_old_report_of_likeliest_tokens_says_so(tmp_path: Path) -> None:
    document = json.loads((OLD / "version-4.json").read_text())
    document["notes"] = ["Of the reference only the likeliest tokens of each position are known: …"]
    assert read_report(written(tmp_path, document)).protocol.top_only


def break_type(document: dict[str, Any]) -> dict[str, Any]:
    document["metrics"]["kl_mean"]["value"] = "small"
    return document


def drop(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda document: {key: value for key, value in document.items() if key != name}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: [d], "a JSON list found"),
        (lambda _: {"a": 1}, "a JSON object with a found"),
        (lambda d: d | {"schema_version": 99}, "version 99 found"),
        (lambda d: d | {"schema_version": "new"}, "no report of headport validate"),
        (break_type, "a damaged report of schema version 5"),
        (drop("protocol"), "missing required field `protocol`"),
        (lambda d: d | {"surplus": 1}, "unknown field `surplus`"),
    ],
)
def test_foreign_and_damaged_documents_are_refused(
    change: Callable[[Any], Any], says: str, tmp_path: Path
) -> None:
    document = change(json.loads(msgspec.json.encode(report())))
    with pytest.raises(UsageError) as caught:
        read_report(written(tmp_path, document))
    message = str(caught.value)
    assert says in message and "report.json" in message and "\n" not in message


@pytest.mark.parametrize("version", range(1, REPORT_SCHEMA_VERSION))
def test_a_damaged_old_report_is_refused(version: int, tmp_path: Path) -> None:
    document = json.loads((OLD / f"version-{version}.json").read_text())
    for path in ("protocol", "slices", "worst"):
        with pytest.raises(UsageError):
            read_report(written(tmp_path, drop(path)(document)))
    with pytest.raises(UsageError, match="damaged report"):
        read_report(written(tmp_path, document | {"slices": [1]}))


def test_a_report_cut_short_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    file = written(tmp_path, report())
    whole = file.read_bytes()
    for length in range(0, len(whole) - 1, 997):
        file.write_bytes(whole[:length])
        with pytest.raises(UsageError, match="no complete JSON document"):
            read_report(file)


def test_a_missing_file_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a report was expected: No such file"):
        read_report(tmp_path / "none.json")
    (tmp_path / "image.json").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(UsageError, match="no complete JSON document"):
        read_report(tmp_path / "image.json")
