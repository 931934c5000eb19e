"""Norms and gates that products take in: found where they are, left where they are not, proved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import transformers

from headport.bundle import Bundle
from headport.errors import ParityError
from headport.export import Options as ExportOptions
from headport.export import export
from headport.kernels import DOMAIN, GAMMA, PRODUCT, VERSION
from headport.lowering import Options as LowerOptions
from headport.lowering import lower, own_fusion, own_fusion_check
from headport.lowering.emit import CONTRIB
from headport.lowering.own_fusion import fuse_gates, fuse_norms
from headport.lowering.own_fusion_check import check_fusions
from headport.lowering.own_kernels import adopt_kernels
from headport.quantize import Options, quantize
from headport.runtime import Generator
from tests.conftest import save_model, save_tokenizer

_PRODUCT = (
    f"{DOMAIN}.BlockMatMul <N = 8, K = 4, bits = 8, block_size = 32, activation_bits = 16, "
    'activation = "none"'
)
_GRAPH = """
    <ir_version: 10, opset_import: ["": 23, "{domain}": {version}, "{contrib}": 1]>
    layer (float[r, 4] x, float[r, 4] skip) => ({outputs})
    <float[4] gamma = {{1, 2, 3, 4}}, float[1] one = {{1}}, float16[r, 4] v, uint8[8, 1, 32] w,
     float[8, 1] s, int64[2] halves = {{{halves}}}>
    {{ {nodes} }}
"""


@pytest.fixture(autouse=True)
def named(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADPORT_KERNELS", str(library))


def _graph(nodes: str, outputs: str = "float[r, 4] y", halves: str = "4, 4") -> ir.Model:
    named = nodes.replace("PRODUCT", f"{_PRODUCT}, epsilon = 0.0>").replace("CONTRIB", CONTRIB)
    text = _GRAPH.format(
        domain=DOMAIN, version=VERSION, contrib=CONTRIB, outputs=outputs, halves=halves, nodes=named
    )
    return ir.from_onnx_text(text)


_SILU = "g, u = Split <axis = -1> (p, halves) h = Sigmoid (g) i = Mul (g, h) y = Mul (i, u)"
_UNCOUNTED = "<axis = -1, num_outputs = 2> (p)"
GATES = {
    "silu": (_SILU, "silu"),
    "silu, turned": (_SILU.replace("(g, h)", "(h, g)").replace("(i, u)", "(u, i)"), "silu"),
    "gelu": (
        'g, u = Split <axis = -1> (p, halves) i = Gelu <approximate = "tanh"> (g) y = Mul (i, u)',
        "gelu_tanh",
    ),
    "halves by their number": (_SILU.replace("<axis = -1> (p, halves)", _UNCOUNTED), "silu"),
    "gelu by erf": ("g, u = Split <axis = -1> (p, halves) i = Gelu (g) y = Mul (i, u)", None),
    "the second half": (
        "u, g = Split <axis = -1> (p, halves) h = Sigmoid (g) i = Mul (g, h) y = Mul (i, u)",
        None,
    ),
    "another axis": (_SILU.replace("-1", "0"), None),
    "squared": (_SILU.replace("Mul (i, u)", "Mul (i, g)"), None),
    "a half that is read again": (_SILU + " z = Neg (u)", None),
    "added": (_SILU.replace("Mul (i, u)", "Add (i, u)"), None),
}


@pytest.mark.parametrize("name", GATES)
def test_gates(name: str) -> None:
    nodes, expected = GATES[name]
    outputs = "float[r, 4] y, float[r, 4] z" if " z = " in nodes else "float[r, 4] y"
    model = _graph(f"p = PRODUCT (x, w, s) {nodes}", outputs)
    before = [node.op_type for node in model.graph]
    matches = fuse_gates(model)
    found = model.graph[0].attributes["activation"].as_string()
    if expected is None:
        assert (matches, found, [n.op_type for n in model.graph]) == ([], "none", before)
        return
    assert (found, [n.op_type for n in model.graph]) == (expected, [PRODUCT])
    assert model.graph.outputs[0].name == "y" and len(matches) == 1


def test_halves_that_are_none() -> None:
    assert fuse_gates(_graph(f"p = PRODUCT (x, w, s) {_SILU}", halves="3, 5")) == []


_NORM = "n, , , t = CONTRIB.SkipSimplifiedLayerNormalization <epsilon = 0.5> (x, skip, gamma)"
_TWO = "float[r, 8] y, float[r, 8] z"


def test_a_norm_with_its_sum() -> None:
    model = _graph(f"{_NORM} u = Neg (t) y = PRODUCT (n, w, s)", "float[r, 8] y, float[r, 4] u")
    assert len(fuse_norms(model)) == 1
    product, negative = model.graph  # in the order in which they can run now
    assert [v.name if v else None for v in product.inputs] == ["x", "w", "s", "skip", "gamma"]
    assert product.attributes["epsilon"].as_float() == 0.5
    assert product.outputs[1] is negative.inputs[0] and product.outputs[1].name == "t"


def test_a_norm_that_two_products_read() -> None:
    model = _graph(f"{_NORM} y = PRODUCT (n, w, s) z = PRODUCT (n, w, s)", _TWO)
    assert len(fuse_norms(model)) == 1
    first, second = model.graph
    assert first.inputs[GAMMA] is not None and second.inputs[0] is first.outputs[2]
    assert [value.name for value in first.outputs] == ["y", "", "n"] and len(second.inputs) == 3


NORMS = {
    "plain": ("n = RMSNormalization <epsilon = 0.5> (x, gamma)", 1),
    "of rows": ("n = RMSNormalization <axis = 0> (x, gamma)", 0),
    "of one number": ("n = RMSNormalization <epsilon = 0.5> (x, one)", 0),
    "of halves": ("v = Cast <to = 10> (x) n = RMSNormalization <epsilon = 0.5> (v, gamma)", 0),
    "with a bias": (_NORM.replace("gamma)", "gamma, gamma)"), 0),
    "with its means": (_NORM.replace("n, , , t", "n, m, , t") + " z = Neg (m)", 0),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    nodes, expected = NORMS[name]
    outputs = _TWO if " z = " in nodes else "float[r, 8] y"
    model = _graph(f"{nodes} y = PRODUCT (n, w, s)", outputs)
    before = len(model.graph)
    assert len(fuse_norms(model)) == expected
    assert len(model.graph) == before - expected


def test_a_norm_that_is_an_output_stays() -> None:
    model = _graph(f"{_NORM} y = PRODUCT (n, w, s)", "float[r, 8] y, float[r, 4] n")
    assert fuse_norms(model) == []


def test_what_has_no_inputs_and_sums_that_are_outputs() -> None:
    outputs = "float[r, 8] y, float[r, 4] t"
    model = _graph(f"c = Constant <value_float = 1.0> () {_NORM} y = PRODUCT (n, w, s)", outputs)
    assert fuse_norms(model) == []


def test_products_of_one_weight_have_names_of_their_own() -> None:
    form = f"{CONTRIB}.MatMulNBits <N = 8, K = 4, bits = 8, block_size = 32, accuracy_level = 4>"
    model = _graph(f"y = {form} (x, w, s) z = {form} (skip, w, s)", _TWO)
    assert len(adopt_kernels(model)) == 2
    names = [value.name for node in model.graph for value in node.outputs]
    assert sorted(names) == ["y", "z"] and all(n.op_type == PRODUCT for n in model.graph)


def _lowered(source: Path, folder: Path, library: Path, **changes: Any) -> tuple[Bundle, Bundle]:
    portable = quantize(Options(bundle=source, output=folder / "q", **changes))
    options = LowerOptions(
        bundle=portable.path, output=folder / "l", target="ort-cpu", kernels=library
    )
    return portable, lower(options)


def _fusions(bundle: Bundle) -> dict[str, Any]:
    fusions = bundle.manifest.provenance.stages[-1].report["products"]["fusions"]
    assert isinstance(fusions, dict)
    return fusions


@pytest.mark.parametrize(
    ("config", "norms", "gates"),
    [
        ("LlamaConfig", 4, 2),
        ("Gemma3TextConfig", 4, 2),  # norms behind products too, and GELU
        ("Phi3Config", 4, 2),  # gate and up in one matrix
        ("GPT2Config", 0, 0),  # neither of these norms nor a gate
    ],
)
def test_families(tmp_path: Path, library: Path, config: str, norms: int, gates: int) -> None:
    sizes: dict[str, Any] = {"vocab_size": 257, "num_hidden_layers": 2, "num_attention_heads": 4}
    if config == "GPT2Config":
        sizes |= {"n_embd": 64, "n_positions": 64}
    else:
        sizes |= {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}
        sizes |= {"max_position_embeddings": 64, "pad_token_id": 0}
    if config == "Gemma3TextConfig":
        sizes |= {"head_dim": 16}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    folder = save_model(tmp_path / "model", getattr(transformers, config)(**sizes))
    save_tokenizer(folder)
    exported = export(ExportOptions(model=str(folder), output=tmp_path / "b"))
    portable, bundle = _lowered(exported.path, tmp_path, library, backbone="int8")
    found = _fusions(bundle)
    assert (found["norms"], found["gates"]) == (norms, gates)
    assert found["error"] < 1e-5
    prompts = [[5, 9, 2], [7], list(range(1, 30))]
    with Generator(portable) as expected, Generator(bundle) as made:
        for each, again in zip(
            expected.generate(prompts, max_new_tokens=12),
            made.generate(prompts, max_new_tokens=12),
            strict=True,
        ):
            assert each.token_ids == again.token_ids


def test_formats_that_differ_share_a_norm(tiny_bundle: Path, tmp_path: Path, library: Path) -> None:
    mixed = {"backbone": "int4", "override": ("*.v_proj=int8", "*.up_proj=int8")}
    _, bundle = _lowered(tiny_bundle, tmp_path, library, **mixed)
    assert _fusions(bundle)["norms"] == 4 and _fusions(bundle)["gates"] == 0


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("int8", "the lowered products move hidden states by"),
        # What 8 bits do to activations would hide it.
        ("int4", "with activations of 16 bits the lowered products move hidden states by"),
    ],
)
def test_a_wrong_norm_is_caught(
    tiny_bundle: Path,
    tmp_path: Path,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    backbone: str,
    message: str,
) -> None:
    honest = own_fusion._fuse_norm

    def turned(graph: ir.Graph, norm: ir.Node, product: ir.Node) -> None:
        place = 2 if norm.op_type == own_fusion._SKIP_NORM else 1
        right = norm.inputs[place]
        assert right is not None and right.const_value is not None
        wrong = ir.tensor(right.const_value.numpy() * np.float32(1.1), name=f"{product.name}.wrong")
        norm.replace_input_with(place, ir.val(wrong.name, const_value=wrong))
        graph.register_initializer(norm.inputs[place])  # type: ignore[arg-type]
        honest(graph, norm, product)

    monkeypatch.setattr(own_fusion, "_fuse_norm", turned)
    with pytest.raises(ParityError, match=message):
        _lowered(tiny_bundle, tmp_path, library, backbone=backbone)
    assert not (tmp_path / "l").exists()


def test_a_wrong_gate_is_caught(
    tiny_bundle: Path, tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = own_fusion._gate

    def other(product: ir.Node) -> Any:
        found = honest(product)
        return None if found is None else ("gelu_tanh", found[1])

    monkeypatch.setattr(own_fusion, "_gate", other)
    with pytest.raises(ParityError, match="move hidden states by"):
        _lowered(tiny_bundle, tmp_path, library, backbone="int8")


def test_what_the_check_compares(
    tiny_bundle: Path, tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bundle = _lowered(tiny_bundle, tmp_path, library, backbone="int8")
    assert check_fusions(bundle).error > 0
    right = own_fusion_check._GATES
    for wrong in (np.tanh, lambda gate: np.full_like(gate, np.nan)):
        monkeypatch.setattr(own_fusion_check, "_GATES", {"silu": wrong})
        with pytest.raises(ParityError, match=r"norm or gate at .*gate_proj.* differs by"):
            check_fusions(bundle)
    monkeypatch.setattr(own_fusion_check, "_GATES", right)
    honest = own_fusion_check.run_prompt

    def a_little_off(*given: Any) -> dict[str, np.ndarray]:
        return {name: values * 1.0001 for name, values in honest(*given).items()}

    monkeypatch.setattr(own_fusion_check, "run_prompt", a_little_off)
    with pytest.raises(ParityError, match=r"norm or gate at .*q_proj.* differs by"):
        check_fusions(bundle)
