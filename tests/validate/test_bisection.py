"""The layer that leaves the reference is named, in portable and lowered bundles."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.errors import UsageError
from headport.session import SessionSettings
from headport.validate.bisection import _judged, bisect
from headport.validate.boundaries import boundaries_of
from headport.validate.candidate import Candidate
from headport.validate.comparison import jobs_of, prepare
from headport.validate.documents import read_texts
from headport.validate.evidence import Bisection
from tests.conftest import llama_config, save_model
from tests.validate.conftest import export_to
from tests.validate.planted.row import constant, weight
from tests.validate.sabotage import read_manifest, reseal


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of five layers and its bundle."""
    folder = tmp_path_factory.mktemp("deep")
    config = llama_config(hidden_size=32, intermediate_size=48, num_hidden_layers=5)
    checkpoint = save_model(folder / "checkpoint", config)
    return checkpoint, export_to(checkpoint, folder / "bundle")


@pytest.fixture(scope="module")
def lowered(deep: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from headport.lowering.command import Options, lower

    output = tmp_path_factory.mktemp("deep") / "ort-cpu"
    return lower(Options(bundle=deep[1], output=output, target="ort-cpu")).path


@pytest.fixture(scope="module")
def rounded(deep: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle with an INT8 backbone."""
    from headport.quantize.command import Options, quantize

    output = tmp_path_factory.mktemp("deep") / "int8"
    return quantize(Options(bundle=deep[1], output=output, backbone="int8", backbone_block=32)).path


def run(folder: Path, texts: Any, reference: Any) -> Bisection:
    bundle = Bundle(folder, read_manifest(folder))
    candidate = Candidate(bundle, threads=1)
    jobs = list(jobs_of(prepare(read_texts(texts), candidate, 0), 40))
    settings = SessionSettings(threads=1).for_target(bundle.manifest.target)
    return bisect(jobs, bundle, settings, reference)


def damaged(source: Path, target: Path, name: str) -> Path:
    """A copy with one weight of a layer 2 % too large."""
    shutil.copytree(source, target)
    weight(name, lambda w: w * 1.02)(target)
    return target


def stages(found: Bisection) -> list[str]:
    return [stage.stage for stage in found.stages]


def test_a_faithful_backbone_has_no_such_stage(
    deep: tuple[Path, Path], lowered: Path, texts: Any, reference_of: Any
) -> None:
    for folder in (deep[1], lowered):
        found = run(folder, texts, reference_of(deep[0]))
        assert found.first is None, found
        assert stages(found) == ["embedding", *(f"layer {i}" for i in range(5)), "final norm"]
        assert max(stage.error for stage in found.stages) < 1e-5
        assert found.finding.startswith("no stage leaves the reference")


@pytest.mark.parametrize("layer", range(5))
def test_the_layer_with_the_fault_is_named(
    layer: int, deep: tuple[Path, Path], texts: Any, reference_of: Any, tmp_path: Path
) -> None:
    copy = damaged(deep[1], tmp_path / "copy", f"layers.{layer}.mlp.down_proj")
    found = run(copy, texts, reference_of(deep[0]))
    assert found.first == f"layer {layer}"
    assert [s.stage for s in found.stages if s.own_error > s.limit] == [found.first]
    later = found.stages[layer + 2 :]
    assert all(s.error > 1e-5 for s in later), "the error travels on"
    assert f"layer {layer} is the first to leave the reference" in found.finding


def _wide_epsilon(name: str, _change: Any) -> Any:
    """The norm that gives a value adds a hundredth to the mean square."""

    def plant(folder: Path) -> None:
        model = ir.load(folder / "backbone.onnx")
        node = next(v for v in model.graph.outputs if v.name == name).producer()
        assert node is not None
        node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-2)
        ir.save(model, folder / "backbone.onnx")

    return plant


@pytest.mark.parametrize(
    ("plant", "name", "stage"),
    [
        (weight, "embed", "embedding"),
        (weight, "layers.3.self_attn.q_proj", "layer 3"),
        (constant, "layers.0.input_layernorm", "layer 0"),
        (_wide_epsilon, "hidden_states", "final norm"),
    ],
)
def test_every_kind_of_stage_in_a_lowered_bundle(
    plant: Any,
    name: str,
    stage: str,
    deep: tuple[Path, Path],
    lowered: Path,
    texts: Any,
    tmp_path: Path,
    reference_of: Any,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(lowered, copy)
    plant(name, lambda w: w * np.float32(1.02))(copy)
    found = run(copy, texts, reference_of(deep[0]))
    assert found.first == stage, found


def test_two_faults_are_both_seen_and_the_first_is_named(
    deep: tuple[Path, Path], texts: Any, reference_of: Any, tmp_path: Path
) -> None:
    copy = damaged(deep[1], tmp_path / "copy", "layers.1.mlp.up_proj")
    weight("layers.4.mlp.up_proj", lambda w: w * 1.02)(copy)
    found = run(copy, texts, reference_of(deep[0]))
    assert [s.stage for s in found.stages if s.own_error > s.limit] == ["layer 1", "layer 4"]
    assert found.first == "layer 1" and "1 other stage does" in found.finding


def test_rounded_layers_are_alike_and_a_fault_among_them_stands_out(
    deep: tuple[Path, Path], rounded: Path, texts: Any, reference_of: Any, tmp_path: Path
) -> None:
    reference = reference_of(deep[0])
    healthy = run(rounded, texts, reference)
    assert healthy.first is None, healthy
    assert min(stage.own_error for stage in healthy.stages[1:-1]) > 1e-4, "rounding is seen"
    copy = tmp_path / "copy"
    shutil.copytree(rounded, copy)
    scales = [t.name for t in read_manifest(copy).tensors if t.name.endswith(".scale")]
    name = next(n for n in scales if "layers.2.mlp.down_proj" in n)
    weight(name, lambda s: s * 1.5)(copy)
    assert run(copy, texts, reference).first == "layer 2"


def test_a_model_with_windows_scaled_embedding_and_norms_behind(
    tiny_gemma2: Path, gemma_bundle: Path, texts: Any, reference_of: Any, tmp_path: Path
) -> None:
    reference = reference_of(tiny_gemma2)
    assert run(gemma_bundle, texts, reference).first is None
    copy = damaged(gemma_bundle, tmp_path / "copy", "layers.1.self_attn.o_proj")
    # The norm behind attention takes the factor out again, so a row is changed instead.
    weight("layers.1.self_attn.o_proj", _one_row_less)(copy)
    assert run(copy, texts, reference).first == "layer 1"


def _one_row_less(w: Any) -> Any:
    w[:, 3] = 0
    return w


def test_a_parallel_block_is_one_layer(
    tiny_phi: Path, phi_bundle: Path, texts: Any, reference_of: Any, tmp_path: Path
) -> None:
    found = run(phi_bundle, texts, reference_of(tiny_phi))
    assert stages(found)[:2] == ["embedding", "layer 0"] and found.first is None
    copy = damaged(phi_bundle, tmp_path / "copy", "layers.0.mlp.fc1")
    assert run(copy, texts, reference_of(tiny_phi)).first == "layer 0"


def test_another_model_is_refused(
    deep: tuple[Path, Path], tiny_llama: Path, texts: Any, reference_of: Any
) -> None:
    with pytest.raises(UsageError, match="the reference has 2 layers and the bundle a layer 4"):
        run(deep[1], texts, reference_of(tiny_llama))


def test_without_a_single_state_between_layers_it_is_refused(
    deep: tuple[Path, Path], texts: Any, reference_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_of(deep[0])
    monkeypatch.setattr(reference, "layer_states", lambda *_, **__: None)
    with pytest.raises(UsageError, match="no single state between its layers"):
        run(deep[1], texts, reference)


def test_a_graph_without_such_a_state_is_refused_before_anything_runs(
    deep: tuple[Path, Path], texts: Any, tmp_path: Path
) -> None:
    from headport.validate.command import Options, validate

    copy = tmp_path / "copy"
    shutil.copytree(deep[1], copy)
    model = ir.load(copy / "backbone.onnx")
    last = next(v for v in model.graph.outputs if v.name == "hidden_states").producer()
    first = boundaries_of(copy / "backbone.onnx")[0].value.name
    embedding = next(v for n in model.graph for v in n.outputs if v.name == first)
    assert last is not None and last.inputs[0] is not None
    # A second stream from the embedding to the last norm, around all layers.
    around = ir.node("Add", [last.inputs[0], embedding])
    model.graph.insert_before(last, around)
    last.replace_input_with(0, around.outputs[0])
    ir.save(model, copy / "backbone.onnx")
    reseal(copy)
    options = Options(bundle=copy, reference="none:such", text=texts, bisect=True)
    with pytest.raises(UsageError, match="one state between layers was expected"):
        validate(options)


def test_the_bundle_itself_is_left_as_it_was(deep: tuple[Path, Path]) -> None:
    assert [b.layer for b in boundaries_of(deep[1] / "backbone.onnx")] == [0, 1, 2, 3, 4, None]
    Bundle.open(deep[1])  # checks every file


def test_a_rounded_layer_without_others_to_judge_it_by_is_refused() -> None:
    shares = np.full((3, 3), 1e-3)
    with pytest.raises(UsageError, match="too few"):
        _judged(["embedding", "layer 0", "final norm"], shares, 8, coarse=True)
    assert _judged(["embedding", "layer 0", "final norm"], shares, 8, coarse=False)
