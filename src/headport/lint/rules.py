"""All rules: those of one graph for TensorRT, and those of a whole bundle, by target."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from headport.lint import (
    defaults,
    tensorrt_attention,
    tensorrt_integers,
    tensorrt_numbers,
    tensorrt_operators,
)
from headport.lint.findings import Finding, GraphRule, Subject

__all__ = ["BUNDLE_RULES", "TENSORRT_RULES", "lint_bundle", "lint_graph"]

TENSORRT_RULES: tuple[GraphRule, ...] = (
    *tensorrt_integers.RULES,
    *tensorrt_attention.RULES,
    *tensorrt_operators.RULES,
    *tensorrt_numbers.RULES,
)
BUNDLE_RULES = defaults.RULES
_OF_TARGETS = {"tensorrt": TENSORRT_RULES}


def lint_graph(model: ir.Model, target: str, name: str = "graph") -> Iterator[Finding]:
    """What one graph holds that a target refuses, widens or ignores.

    Args:
        model: Any ONNX graph, as the target would read it.
        target: `tensorrt`, `ort-cpu` or `ort-cuda`.
        name: Of the graph, for the findings.
    """
    for rule in _OF_TARGETS.get(target, ()):
        for place in rule.check(model):
            yield Finding(
                rule.name, rule.severity, name, place.node, place.found, rule.why, rule.cure
            )


def lint_bundle(subject: Subject, target: str) -> Iterator[Finding]:
    """What a bundle holds that a target takes although it is rarely meant, and its graphs' own."""
    for rule in BUNDLE_RULES:
        if target in rule.targets:
            for graph, place in rule.check(subject):
                yield Finding(
                    rule.name, rule.severity, graph, place.node, place.found, rule.why, rule.cure
                )
    for name, model in subject.models.items():
        yield from lint_graph(model, target, name)
