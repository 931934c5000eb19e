"""What to do next follows from what was found."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headport.validate.advice import next_steps
from headport.validate.evidence import Attribution
from tests.validate.reports import evidence, report

GATE = report().gates[0]
FAILED = {"verdict": "failed", "gates": (msgspec.structs.replace(GATE, verdict="failed"),)}


def undecided(**changes: Any) -> dict[str, Any]:
    gate = msgspec.structs.replace(GATE, verdict="undecided", **changes)
    return {"verdict": "undecided", "gates": (gate,)}


def drift(part: str) -> Attribution:
    return Attribution(tokens=1, parts=(), largest=part, finding="")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "may be shipped"),
        (FAILED, "Do not ship this bundle: kl_mean (all texts) failed"),
        (FAILED | {"attribution": drift("head")}, "quantize --head"),
        (FAILED | {"attribution": drift("backbone"), "bisection": None}, "--bisect"),
        (FAILED | {"attribution": drift("backbone")}, "layer 0 is the first"),
        (FAILED | {"attribution": None}, "--attribution-tokens 512"),
        (undecided(tokens_needed=900), "about 900 tokens, 42 were scored"),
        (undecided(reason="whatever it says", low=None, high=None), "Give more documents"),
        ({"flips": msgspec.structs.replace(evidence("a", "")["flips"], beyond_noise=3)}, "the 3"),
    ],
)
def test_advice(changes: dict[str, Any], says: str) -> None:
    steps = next_steps(report(**changes))
    assert any(says in step for step in steps), steps
    shipped = any("may be shipped" in step for step in steps)
    assert shipped == (changes.get("verdict", "passed") == "passed")


def test_another_reference_comes_first() -> None:
    other = msgspec.structs.replace(report().reference, sha256="9" * 64)
    assert next_steps(report(reference=other, **FAILED))[0].startswith("First make sure")
