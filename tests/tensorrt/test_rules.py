"""Every lint rule against the library itself: what it forbids fails, or passes in silence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from headport.engines import EngineProfile
from headport.lint.rules import TENSORRT_RULES
from headport.runtime.engine.backends import compute_capabilities
from headport.runtime.engine.builder import CALLS, build_plan
from headport.runtime.engine.request import BuildAnswer, BuildRequest
from headport.runtime.tensorrt import refit
from tests.tensorrt.graphs import CASES, Case

RULES = {rule.name: rule for rule in TENSORRT_RULES}


def build(trt: Any, model: ir.Model, folder: Path) -> tuple[BuildAnswer, int]:
    """What the builder answers, and how large the plan is."""
    file, plan = folder / "g.onnx", folder / "g.plan"
    ir.save(model, file)
    shapes = {
        value.name: tuple(
            tuple(d if isinstance(d, int) else size for d in value.shape) for size in (1, 8, 16)
        )
        for value in model.graph.inputs
        if not all(isinstance(d, int) for d in value.shape)
    }
    request = BuildRequest(
        backend="tensorrt-rtx",
        model=str(file),
        plan=str(plan),
        inputs=(),
        profiles=(EngineProfile(name="all", shapes=shapes),) if shapes else (),
        compute_capabilities=("SM89",),
    )
    answer = build_plan(trt, request)
    return answer, plan.stat().st_size if answer.error is None else 0


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{n}-{CASES[n].rule}")
def test_the_library_does_what_the_rule_says(rtx: Any, tmp_path: Path, number: int) -> None:
    case: Case = CASES[number]
    rule = RULES[case.rule]
    answer, size = build(rtx, case.breaks(), tmp_path)
    if answer.faults:
        found = answer.faults[0].code
    elif answer.error and not answer.error.startswith("the builder warns: Unused Input"):
        found = "builder"
    else:
        found = "silent"
    assert found in rule.answers, answer.error
    kept, kept_size = build(rtx, case.keeps(), tmp_path)
    assert kept.error is None
    if case.rule == "widened-weight":  # as large as the same weight in float32
        assert abs(size - kept_size) < 1024


def test_dropped_inputs_are_an_error(rtx: Any, tmp_path: Path) -> None:
    [padded] = [case for case in CASES if case.rule == "attention-padding"]
    answer, _ = build(rtx, padded.breaks(), tmp_path)
    assert answer.error is not None and re.search(r"Unused Input: n\b", answer.error)


def test_a_computed_top_k_beyond_the_limit_is_an_error(rtx: Any, tmp_path: Path) -> None:
    [case] = [case for case in CASES if case.rule == "computed-top-k"]
    file = tmp_path / "g.onnx"
    ir.save(case.breaks(), file)
    profile = EngineProfile(name="all", shapes={"x": ((4, 1), (4, 8), (4, 5000))})
    request = BuildRequest(
        backend="tensorrt-rtx",
        model=str(file),
        plan=str(tmp_path / "p"),
        inputs=(),
        profiles=(profile,),
        compute_capabilities=("SM89",),
    )
    answer = build_plan(rtx, request)
    assert answer.error is not None and "3840" in answer.error


def test_all_that_is_called_exists(rtx: Any) -> None:
    for call in (*CALLS, *refit.CALLS):
        owner, _, name = call.partition(".")
        assert hasattr(rtx, owner), call
        assert not name or hasattr(getattr(rtx, owner), name), call


def test_the_known_generations(rtx: Any) -> None:
    assert {"SM86", "SM89", "SM120"} <= set(compute_capabilities(rtx))


def test_the_present_gpu_needs_a_driver(rtx: Any, tmp_path: Path) -> None:
    from headport.gpu_probe import probe_gpu

    if probe_gpu():
        pytest.skip("there is a GPU")
    assert rtx.Runtime(rtx.Logger(rtx.Logger.ERROR)).deserialize_cuda_engine(b"x" * 64) is None
