"""The report's schema is published, current, and true of real reports."""

from __future__ import annotations

import json
from importlib.resources import files

import jsonschema
import msgspec
import pytest

from headport.validate.figures import FIGURES
from headport.validate.report import Metrics, Report, schema_text
from tests.validate.reports import report


def published() -> str:
    return (files("headport.validate") / "report.schema.json").read_text(encoding="utf-8")


def test_the_published_schema_is_current() -> None:
    assert published() == schema_text(), "run python -m headport.validate.report"


def test_a_report_obeys_the_schema() -> None:
    schema = json.loads(published())
    jsonschema.Draft202012Validator.check_schema(schema)
    document = json.loads(msgspec.json.encode(report()))
    jsonschema.validate(document, schema)
    document["metrics"]["kl_mean"]["value"] = "small"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


def test_a_report_is_read_back_as_it_was() -> None:
    assert msgspec.json.decode(msgspec.json.encode(report()), type=Report) == report()


def test_fields_are_those_that_are_promised() -> None:
    document = json.loads(msgspec.json.encode(report()))
    promised = "schema_version verdict gates protocol reference candidate tokens_scored documents"
    assert set(f"{promised} slices metrics".split()) <= document.keys()
    assert set(document["metrics"]["kl_mean"]) == {"value", "low", "high", "error"}
    assert document["slices"][0]["metrics"].keys() == document["metrics"].keys()


def test_metrics_are_named_once() -> None:
    named = [field.name for field in msgspec.structs.fields(Metrics)]
    assert named == [figure.name for figure in FIGURES]


def test_only_a_passed_report_is_true() -> None:
    assert report()
    assert not report(verdict="failed")
    assert not report(verdict="undecided")
