"""Writing graphs: each tensor once, the ledger complete, everything found again after a move."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle, draft_bundle
from headport.errors import BundleError
from headport.graphs import add_stage, graph_entry, load_graphs, rewrite_bundle, write_graphs
from headport.runner import open_runner
from headport.selftest import write_selftest
from tests.toy_bundles import write_toy


def _model(**arrays: np.ndarray) -> ir.Model:
    x = ir.val("x", ir.DataType.FLOAT, ["n"])
    node = ir.node("Identity", [x])
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    node.outputs[0].shape = ir.Shape(["n"])
    values = [
        ir.val(name, const_value=ir.tensor(array, name=name)) for name, array in arrays.items()
    ]
    graph = ir.Graph(
        [x], node.outputs, nodes=[node], initializers=values, opset_imports={"": 23}, name="g"
    )
    return ir.Model(graph, ir_version=10)


def _matrix(rows: int, fill: float) -> np.ndarray:
    return np.full((rows, 4), fill, np.float32)


def test_each_tensor_is_stored_once(tmp_path: Path) -> None:
    models = {
        "a": _model(w=_matrix(400, 1), same=_matrix(400, 1), only=_matrix(3, 2)),
        "b": _model(v=_matrix(400, 1), other=_matrix(400, 3)),
    }
    ledger = write_graphs(models, {"a": "a.onnx", "b": "b.onnx"}, tmp_path)
    assert {t.name: (t.file, t.consumers) for t in ledger} == {
        "w": ("data/shared.bin", ("a:w", "a:same", "b:v")),
        "only": ("data/a.bin", ("a:only",)),
        "other": ("data/b.bin", ("b:other",)),
    }
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "data").iterdir()}
    assert sizes == {"shared.bin": 6400, "a.bin": 48, "b.bin": 6400}
    for t in ledger:
        data = (tmp_path / t.file).read_bytes()[t.offset : t.offset + t.length]
        assert hashlib.sha256(data).hexdigest() == t.sha256


def test_equal_bytes_of_another_type_or_shape_are_not_shared(tmp_path: Path) -> None:
    zeros = np.zeros((8, 4), np.float32)
    model = _model(f=zeros, i=zeros.view(np.int32).copy(), t=zeros.reshape(4, 8))
    assert len(write_graphs({"a": model}, {"a": "a.onnx"}, tmp_path)) == 3


def test_large_tensors_start_on_a_page(tmp_path: Path) -> None:
    model = _model(small=_matrix(3, 1), large=_matrix(300, 2), last=_matrix(300, 3))
    offsets = {t.name: t.offset for t in write_graphs({"a": model}, {"a": "a.onnx"}, tmp_path)}
    assert offsets == {"small": 0, "large": 4096, "last": 12288}


def test_small_vectors_stay_inside(tmp_path: Path) -> None:
    model = _model(shape=np.arange(3), long=np.zeros(300, np.float32), one=np.ones((1, 1)))
    ledger = write_graphs({"a": model}, {"a": "a.onnx"}, tmp_path)
    assert sorted(t.name for t in ledger) == ["long", "one"]


def test_an_initialiser_without_value_is_refused(tmp_path: Path) -> None:
    model = _model(w=_matrix(2, 1))
    model.graph.initializers["w"].const_value = None
    with pytest.raises(BundleError, match="a: initialiser w has no value"):
        write_graphs({"a": model}, {"a": "a.onnx"}, tmp_path)


def test_written_twice_is_the_same(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        write_graphs({"a": _model(w=_matrix(9, 1))}, {"a": "a.onnx"}, tmp_path / name)
    for file in ("a.onnx", "data/a.bin"):
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()


def test_rewriting_carries_everything_else(tmp_path: Path) -> None:
    source = write_toy(tmp_path / "toy", np.eye(5, 7, dtype=np.float32), tied=True)
    models = load_graphs(source)
    weight = models["head.lm"].graph.initializers["w"]
    weight.const_value = ir.tensor(np.full((5, 7), 2, np.float32), name="w")
    with draft_bundle(tmp_path / "out", force=False) as draft:
        made = rewrite_bundle(source, models, draft.path)
        assert made.selftest is None and not (draft.path / "selftest.safetensors").exists()
        assert [t.consumers for t in made.tensors] == [("backbone:embed",), ("head.lm:w",)]
        head = msgspec.structs.replace(made.heads["lm"], weight="w", tied=False)
        preview = draft.preview(msgspec.structs.replace(made, heads={"lm": head}))
        bundle = draft.commit(write_selftest(preview))
    assert (bundle.path / "LICENSE").read_bytes() == (source.path / "LICENSE").read_bytes()
    assert set(bundle.manifest.files) - set(source.manifest.files) == {
        "data/backbone.bin",
        "data/head.lm.bin",
    }
    moved = (tmp_path / "out").rename(tmp_path / "elsewhere")
    logits = open_runner(Bundle.open(moved)).head(np.ones((1, 7), np.float32)).logits
    assert logits.tolist() == [[14.0] * 5]


def test_small_tensors_of_another_bundle_are_taken_along(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    model = _model(w=np.zeros(4, np.float32))
    model.graph.initializers["w"].const_value = ir.ExternalTensor(
        "x.bin", 0, 16, ir.DataType.FLOAT, shape=ir.Shape([4]), name="w", base_dir=tmp_path / "a"
    )
    assert write_graphs({"a": model}, {"a": "a.onnx"}, tmp_path / "b") == ()
    found = ir.load(tmp_path / "b" / "a.onnx").graph.initializers["w"].const_value
    assert found is not None and found.numpy().tolist() == [0, 1, 2, 3]


def test_ports() -> None:
    model = _model()
    entry = graph_entry(model, "a.onnx", "head")
    assert msgspec.to_builtins(entry.inputs[0]) == {"name": "x", "dtype": "float", "shape": ("n",)}
    model.graph.inputs[0].shape = None
    with pytest.raises(BundleError, match="port x has no declared type or shape"):
        graph_entry(model, "a.onnx", "head")


def test_a_stage_is_appended(tmp_path: Path) -> None:
    source = write_toy(tmp_path / "toy", np.eye(3, 4, dtype=np.float32))
    made = add_stage(add_stage(source.manifest, "one", {"a": 1}, {}), "two", {}, {"b": 2})
    first, second = made.provenance.stages
    assert (first.stage, first.options, second.report) == ("one", {"a": 1}, {"b": 2})
    assert {"headport", "onnx-ir", "onnxruntime"} <= first.versions.keys()


def test_tensors_with_a_second_name_are_refused(tmp_path: Path) -> None:
    bundle = write_toy(tmp_path / "toy", np.eye(40, 24, dtype=np.float32))
    name = min(tensor.file for tensor in bundle.manifest.tensors)
    (tmp_path / "second").hardlink_to(bundle.path / name)
    with pytest.raises(BundleError, match=r"this one has 2 names \(hard links\); copy the bundle"):
        load_graphs(bundle)
