from __future__ import annotations

import pytest

from headport.lint.rules import TENSORRT_RULES, lint_graph
from tests.tensorrt.graphs import CASES, integers, mixed, restored


def named(model):
    return {finding.rule for finding in lint_graph(model, "tensorrt")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_graph_that_breaks_a_rule_is_found_and_its_like_is_not(case):
    assert case.rule in named(case.breaks())
    assert case.rule not in named(case.keeps())


def test_every_rule_has_a_graph_that_breaks_it():
    assert {case.rule for case in CASES} == {rule.name for rule in TENSORRT_RULES}


def test_rules_have_names_of_their_own_and_say_how_the_target_answers():
    names = [rule.name for rule in TENSORRT_RULES]
    assert len(set(names)) == len(names)
    assert all(rule.answers and rule.why and rule.cure for rule in TENSORRT_RULES)


def test_a_finding_names_node_reason_and_cure():
    [found] = lint_graph(mixed(), "tensorrt", "head.lm")
    assert found.graph == "head.lm"
    assert found.node == "y"
    assert "float and float16" in found.found
    assert found.why in str(found) and found.cure in str(found)


def test_other_targets_have_none_of_these_rules():
    assert not list(lint_graph(mixed(), "ort-cpu"))


def test_what_keeps_the_rules_is_clean():
    assert not named(restored(integers()))
