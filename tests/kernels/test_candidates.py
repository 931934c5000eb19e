"""Heads whose candidates the own kernel ranks: what they answer, and what `lower` refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from benchmarks.hunt import CASES, HeadCase, hunt, make_heads
from headport.bundle import Bundle
from headport.certificate_check import check_certificate
from headport.errors import ParityError
from headport.heads import HeadOutput, HeadSessions
from headport.kernels import CANDIDATES, PRODUCT
from headport.lowering import Options as LowerOptions
from headport.lowering import lower, targets
from headport.lowering.head import lower_head
from headport.lowering.match import Match
from headport.lowering.own_candidates import adopt_candidates
from headport.lowering.own_kernels import adopt_in_head
from headport.manifest import Head
from headport.quantize import Options, quantize
from headport.runner import Candidates, open_runner
from tests.toy_bundles import write_toy

V, H, M = 203, 72, 10
RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(V, H)).astype(np.float32)
WEIGHT[90:94] = WEIGHT[5]  # equal rows
BIAS = RNG.normal(size=V).astype(np.float32)
BIAS[90:94] = BIAS[5] = 40  # which are best
STATES = RNG.normal(size=(40, H)).astype(np.float32)
ALL: dict[str, Any] = {"bias": BIAS, "scale": 0.7, "softcap": 20.0}
Edit = Callable[[ir.Graph, ir.Node], None]


@pytest.fixture(autouse=True)
def named(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADPORT_KERNELS", str(library))


def _quantized(folder: Path, toy: dict[str, Any], **options: Any) -> Bundle:
    source = write_toy(folder / "toy", WEIGHT, **toy)
    asked: dict[str, Any] = {"certify": True, "rescore": M, "block": 32, **options}
    return quantize(Options(bundle=source.path, output=folder / "int8", head="int8", **asked))


def _lowered(bundle: Bundle, folder: Path, kernels: Path | None) -> Bundle:
    options = LowerOptions(bundle=bundle.path, output=folder, target="ort-cpu", kernels=kernels)
    return lower(options)


def _stage(bundle: Bundle) -> dict[str, Any]:
    return bundle.manifest.provenance.stages[-1].report


def _types(bundle: Bundle) -> list[str]:
    return [node.op_type for node in ir.load(bundle.path / "head.lm.onnx").graph]


def _candidates(bundle: Bundle, states: np.ndarray, noise: np.ndarray | None = None) -> Candidates:
    found = open_runner(bundle).head(states, noise=noise).candidates
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("toy", "options"),
    [
        ({}, {}),
        (ALL, {}),
        (ALL, {"bound": "block"}),
        (ALL, {"certify": False}),
        (ALL, {"activations": "rounded"}),
        ({}, {"rescore": V - 1}),
        ({"tied": True}, {"activations": "exact"}),
    ],
    ids=["plain", "all", "block", "unproved", "rounded", "most", "tied"],
)
def test_a_head_answers_as_with_the_nodes_of_onnx_runtime(
    tmp_path: Path, library: Path, toy: dict[str, Any], options: dict[str, Any]
) -> None:
    portable = _quantized(tmp_path, toy, **options)
    plain = _lowered(portable, tmp_path / "plain", None)
    own = _lowered(portable, tmp_path / "own", library)
    assert _types(own).count(CANDIDATES) == 1 and "TopK" not in _types(own)
    assert "Sum" not in _types(own) or toy.get("bias") is not None
    rows = _stage(own)["candidates"]["lm"]
    certified = portable.manifest.heads["lm"].candidates.certified  # type: ignore[union-attr]
    assert rows["rows"] > 10 and (rows["certified"] > 0) == certified
    noise = np.random.default_rng(3).normal(0, 2, (len(STATES), V)).astype(np.float32)
    for given in (None, noise, noise[:, :1] * 0):
        expected, found = (_candidates(bundle, STATES, given) for bundle in (plain, own))
        for row in range(len(STATES)):
            at = {int(token): place for place, token in enumerate(expected.ids[row])}
            both = [(at[t], place) for place, t in enumerate(found.ids[row].tolist()) if t in at]
            assert len(both) >= min(M, V - 1) - 2  # a kernel may change the last
            was, now = map(list, zip(*both, strict=True))
            np.testing.assert_allclose(
                expected.logits[row, was], found.logits[row, now], atol=1e-12
            )
        np.testing.assert_allclose(found.logsumexp, expected.logsumexp, atol=1e-2)
        np.testing.assert_allclose(found.error, expected.error, rtol=1e-12)
        assert (np.abs(found.certified_k - expected.certified_k) <= 3).all()
    if certified:
        assert check_certificate(own, open_runner(own))


def test_rows_are_the_same_alone_and_those_that_are_not_finite_prove_nothing(
    tmp_path: Path, library: Path
) -> None:
    bundle = _lowered(_quantized(tmp_path, {"bias": BIAS}), tmp_path / "own", library)
    together, alone = _candidates(bundle, STATES), _candidates(bundle, STATES[7:8])
    for name in ("ids", "logits", "logsumexp", "certified_k", "cut", "error"):
        assert (getattr(together, name)[7:8] == getattr(alone, name)).all()
    states = STATES[:4].copy()
    states[0, 5], states[1, 5], states[2] = np.nan, np.inf, 1e30
    found = _candidates(bundle, states)
    assert found.certified_k[:3].tolist() == [0, 0, 0] and np.isposinf(found.cut[:3]).all()
    assert not np.isfinite(found.logits[:2]).all(1).any()
    assert not np.isfinite(found.logsumexp[:2]).any()
    assert found.certified_k[3] > 0 and np.isfinite(found.cut[3])


def test_a_head_that_gives_logits_needs_no_guard(tmp_path: Path, library: Path) -> None:
    source = write_toy(tmp_path / "toy", WEIGHT, bias=BIAS)
    states = STATES[:3].copy()
    states[0, 5], states[1, 70] = np.nan, -np.inf
    # With INT4, activations of 16 bits and of 8.
    for form, kept in (("int8", "residual"), ("int4", "residual"), ("int4", "rounded")):
        how: dict[str, Any] = {"head": form, "block": 32, "activations": kept}
        output = tmp_path / f"{form}-{kept}"
        portable = quantize(Options(bundle=source.path, output=output, **how))
        bundle = _lowered(portable, output.with_suffix(".own"), library)
        assert (_types(bundle).count(PRODUCT), _types(bundle).count("ReduceSum")) == (1, 0)
        logits = open_runner(bundle).full_logits(states)
        assert np.isnan(logits[:2]).all() and np.isfinite(logits[2]).all()
    unbiased = write_toy(tmp_path / "unbiased", WEIGHT)
    portable = quantize(Options(bundle=unbiased.path, output=tmp_path / "q", head="int8"))
    types = _types(_lowered(portable, tmp_path / "own", library))
    assert [each for each in types if each != "Identity"] == [PRODUCT]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_nothing_that_is_proved_is_wrong(tmp_path: Path, library: Path, case: HeadCase) -> None:
    truth, (*_, own) = make_heads(case, tmp_path, kernels=library)
    assert CANDIDATES in _types(own)
    found = hunt(truth, own, 512, seed=2)
    assert (found.rows, found.false) == (512, 0)
    assert found.first_proved > 64 and found.ranks_proved > 512


def _scaled(place: int, factor: float) -> Edit:
    def edit(graph: ir.Graph, node: ir.Node) -> None:
        terms = graph.initializers["candidates.terms"].const_value.numpy().copy()  # type: ignore[union-attr]
        terms[place] *= factor
        graph.initializers["candidates.terms"].const_value = ir.tensor(terms)

    return edit


def _given(place: int, other: str | None) -> Edit:
    def edit(graph: ir.Graph, node: ir.Node) -> None:
        values = {value.name: value for value in graph.outputs}
        node.replace_input_with(place, values[other] if other else None)

    return edit


def _of_other_rows(graph: ir.Graph, node: ir.Node) -> None:
    weight = node.inputs[4].const_value.numpy()  # type: ignore[union-attr]
    other = ir.val("other", const_value=ir.tensor(np.roll(weight, 1, axis=0), name="other"))
    graph.register_initializer(other)
    node.replace_input_with(4, other)


def _without_bias(graph: ir.Graph, node: ir.Node) -> None:
    graph.initializers["candidates.bias"].const_value = ir.tensor(np.zeros(V, np.float32))


def _without_noise(graph: ir.Graph, node: ir.Node) -> None:
    none = ir.val("none", const_value=ir.tensor(np.zeros((1, 1), np.float32), name="none"))
    graph.register_initializer(none)
    node.replace_input_with(2, none)


def _unproved(graph: ir.Graph, node: ir.Node) -> None:
    node.attributes["certified"] = ir.AttrInt64("certified", 0)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (_scaled(0, 1.001), "candidates' logits"),
        (_scaled(1, 0.0), "candidates' logits"),
        (_scaled(2, 0.5), "error"),
        (_scaled(3, 0.5), "error"),
        (_given(1, "quantised_logits"), "cut|candidates"),
        (_given(3, "upper_bounds"), "logsumexp"),
        (_without_bias, "error|candidates' logits"),
        (_given(7, None), "proved ranks"),
        (_of_other_rows, "candidates' logits"),
        (_unproved, "cut"),
        (_without_noise, "candidates of .* with noise"),
    ],
    ids=[
        "scale",
        "cap",
        "slope",
        "rest",
        "upper",
        "logits",
        "bias",
        "firsts",
        "rows",
        "proof",
        "noise",
    ],
)
def test_a_wrong_node_is_caught_and_nothing_is_written(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, edit: Edit, what: str
) -> None:
    portable = _quantized(tmp_path, ALL)

    def wrong(model: ir.Model, head: Head, name: str) -> list[Match]:
        matches = adopt_candidates(model, head, name)
        edit(model.graph, next(n for n in model.graph if n.op_type == CANDIDATES))
        return matches

    monkeypatch.setattr(targets, "adopt_candidates", wrong)
    with pytest.raises(ParityError, match=f"the lowered head lm: ({what}).* do not follow"):
        _lowered(portable, tmp_path / "own", library)
    assert not (tmp_path / "own").exists()


def test_a_graph_of_another_form_keeps_its_nodes(tmp_path: Path, library: Path) -> None:
    portable = _quantized(tmp_path, {})
    model = ir.load(portable.path / "head.lm.onnx")
    head = portable.manifest.heads["lm"]
    [error] = [value for value in model.graph.outputs if value.name == "error"]
    summed = error.producer().inputs[0].producer()  # type: ignore[union-attr]
    summed.op_type = "Sub"  # type: ignore[union-attr]
    [match] = adopt_candidates(model, head, "lm")
    assert match.became is None and "quantise it again" in match.reason
    assert CANDIDATES not in [node.op_type for node in model.graph]


def _moved(field: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[..., HeadOutput]:
    """A head one of whose answers is another, without noise and with some."""

    def head(self: HeadSessions, *given: Any) -> HeadOutput:
        output = ANSWERS(self, *given)
        assert output.candidates is not None
        new = {field: change(getattr(output.candidates, field).copy())}
        return replace(output, candidates=replace(output.candidates, **new))

    return head


ANSWERS = HeadSessions.head


def _with_equals_swapped(ids: np.ndarray) -> np.ndarray:
    """90 and 91 have equal rows and follow one another."""
    return np.where(ids == 90, 91, np.where(ids == 91, 90, ids))


@pytest.mark.parametrize(
    ("field", "change", "what"),
    [
        ("ids", lambda ids: np.where(ids == 5, 6, ids), "candidates"),
        ("ids", lambda ids: ids[:, ::-1], "candidates' logits"),
        ("ids", _with_equals_swapped, "candidates' order"),
        ("logits", lambda z: z * (1 + 1e-12), "candidates' logits"),
        ("logits", lambda z: z[:, ::-1], "candidates' logits"),
        ("logsumexp", lambda mass: mass + 1e-3, "logsumexp"),
        ("certified_k", lambda k: k + (k > 0), "proved ranks"),
        ("certified_k", lambda k: k * 0, "proved ranks"),
        ("cut", lambda cut: np.nextafter(cut, 0), "cut"),
        ("error", lambda error: error * 0.999, "error"),
    ],
)
def test_the_check_sees_each_answer(
    tmp_path: Path,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    change: Callable[[np.ndarray], np.ndarray],
    what: str,
) -> None:
    portable = _quantized(tmp_path, {"bias": BIAS})
    monkeypatch.setattr(HeadSessions, "head", _moved(field, change))
    with pytest.raises(ParityError, match=f"head lm: {what} of .* do not follow"):
        _lowered(portable, tmp_path / "own", library)


@pytest.mark.parametrize("certify", [True, False])
def test_a_head_in_half_precision_keeps_its_nodes(
    tmp_path: Path, library: Path, certify: bool
) -> None:
    source = write_toy(tmp_path / "toy", WEIGHT.astype(np.float16))
    asked: dict[str, Any] = {"rescore": M, "block": 32, "certify": certify}
    portable = quantize(Options(bundle=source.path, output=tmp_path / "q", head="int8", **asked))
    bundle = _lowered(portable, tmp_path / "own", library)
    assert CANDIDATES not in _types(bundle)
    [line] = [x for x in _stage(bundle)["portable"] if "candidates" in x]
    assert "no hidden states and original weight in float32" in line
    assert _stage(bundle)["candidates"] == {}


def test_rows_that_differ_in_the_sign_of_a_zero_are_not_equal(
    tmp_path: Path, library: Path
) -> None:
    weight, bias = WEIGHT.copy(), BIAS.copy()
    weight[7], bias[7] = weight[5], bias[5]
    weight[5, 3], weight[7, 3] = 0.0, -0.0
    source = write_toy(tmp_path / "toy", weight, bias=bias)
    asked: dict[str, Any] = {"rescore": M, "block": 32, "certify": True}
    portable = quantize(Options(bundle=source.path, output=tmp_path / "q", head="int8", **asked))
    assert _stage(_lowered(portable, tmp_path / "own", library))["candidates"]["lm"]["rows"] > 10


def test_a_product_of_onnx_runtime_keeps_its_guard(tmp_path: Path, library: Path) -> None:
    source = write_toy(tmp_path / "toy", WEIGHT)
    asked: dict[str, Any] = {"head": "int4", "asymmetric": True, "block": 32, "backbone": "none"}
    portable = quantize(Options(bundle=source.path, output=tmp_path / "q", **asked))
    model, head = ir.load(portable.path / "head.lm.onnx"), portable.manifest.heads["lm"]
    lower_head(model, head, "lm")
    [match] = adopt_in_head(model, head, "lm")
    assert match.became is None and "zero points" in match.reason
    types = [node.op_type for node in model.graph]
    assert types.count("ReduceSum") == 1 and types.count("Sum") == 1


def test_only_a_sum_of_zeros_is_a_guard(tmp_path: Path) -> None:
    source = write_toy(tmp_path / "toy", WEIGHT)
    asked: dict[str, Any] = {"head": "int8", "block": 32, "activations": "rounded"}
    portable = quantize(Options(bundle=source.path, output=tmp_path / "q", **asked))
    for factor, kept in ((0.0, 0), (1.0, 1)):
        model, head = ir.load(portable.path / "head.lm.onnx"), portable.manifest.heads["lm"]
        lower_head(model, head, "lm")
        for value in model.graph.initializers.values():
            if value.const_value is not None and value.const_value.size == 1:
                value.const_value = ir.tensor(np.array(factor, np.float32))
        adopt_in_head(model, head, "lm")
        assert [node.op_type for node in model.graph].count("ReduceSum") == kept


def test_other_tables_are_no_original_weight(tmp_path: Path) -> None:
    portable = _quantized(tmp_path, {})
    for array in (WEIGHT[:, :-1], WEIGHT.astype(np.float16)):
        model, head = ir.load(portable.path / "head.lm.onnx"), portable.manifest.heads["lm"]
        [rows] = [n for n in model.graph if n.op_type == "Gather" and n.inputs[0].shape == (V, H)]  # type: ignore[union-attr]
        table = rows.inputs[0]
        assert table is not None
        table.const_value = ir.tensor(array)
        table.shape, table.type = ir.Shape(array.shape), ir.TensorType(ir.tensor(array).dtype)
        [match] = adopt_candidates(model, head, "lm")
        assert match.became is None and "original weight in float32" in match.reason
