"""The check of the written file, and that it notices files that answer otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.merge import Options, merge
from headport.merge.parity import MergeParity, check_merged, plan_cases
from tests.merge.layouts import use_fusible_layout


def merged(bundle: Path, output: Path, runtime: str = "both") -> Path:
    merge(Options(bundle=bundle, output=output, runtime=runtime))
    return output / "model.onnx"


def checked(bundle: Path, file: Path) -> MergeParity:
    source = Bundle.open(bundle, verify=False)
    cases = plan_cases(source.manifest.model.max_context, (8,), 257, ("left", "right"))
    return check_merged(source, file, cases, (8,))


def test_cases() -> None:
    alone, left, right = plan_cases(64, (8, 0), 257, ("left", "right"))
    assert alone.steps == ((30,), (31,), (1,), (1,), (1,))
    assert left.steps == right.steps == ((61, 3, 9), *[(1, 1, 1)] * 3)
    assert (left.side, right.side) == ("left", "right")
    # A long context is not filled, but windows below the reach are crossed.
    assert plan_cases(8192, (100, 4096), 257, ())[0].steps[0] == (52,)
    assert plan_cases(8192, (0,), 257, ())[0].steps[0] == (10,)
    # 512 MiB of logits of half a million tokens are 268 positions.
    assert plan_cases(8192, (600,), 500_000, ())[0].steps[0] == (10,)
    assert plan_cases(1, (), 257, ())[0].steps == ((1,),)


def test_a_right_file_passes_and_windows_are_crossed(gemma2_bundle: Path, tmp_path: Path) -> None:
    found = checked(gemma2_bundle, merged(gemma2_bundle, tmp_path / "m", "genai"))
    assert found and found.positions > 100 and not found.windows_not_crossed
    assert set(found.bundle_options.errors) == {
        "alone",
        "left-padded batch",
        "right-padded batch",
    }
    assert max(found.bundle_options.errors.values()) < 1e-5
    assert found.bundle_options.top1_changed == 0


def change(file: Path, name: str, factor: float) -> None:
    model = ir.load(file)
    value = model.graph.initializers[name]
    assert value.const_value is not None
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    offset, array = tensor.offset, tensor.numpy() * np.float32(factor)
    with (file.parent / "model.onnx.data").open("r+b") as stream:
        stream.seek(offset or 0)
        stream.write(array.tobytes())


def test_a_weight_that_is_a_thousandth_off_is_noticed(tiny_bundle: Path, tmp_path: Path) -> None:
    file = merged(tiny_bundle, tmp_path / "m")
    change(file, "lm_head.weight", 1.001)
    found = checked(tiny_bundle, file)
    assert not found and found.bundle_options.max_abs_logit_error > 1e-3


@pytest.mark.parametrize(("window", "passes"), [(8, True), (9, False), (7, False)])
def test_a_window_that_is_one_off_is_noticed(
    gemma2_bundle: Path, tmp_path: Path, window: int, passes: bool
) -> None:
    file = merged(gemma2_bundle, tmp_path / "m", "genai")
    model = ir.load(file)
    for node in model.graph:
        if node.op_type.startswith("CachedAttention") and node.attributes["window"].as_int():
            node.attributes["window"] = ir.AttrInt64("window", window)
    ir.save(model, file)
    assert bool(checked(gemma2_bundle, file)) == passes


def test_what_default_options_change_is_measured(int8_bundle: Path, tmp_path: Path) -> None:
    file = merged(int8_bundle, tmp_path / "m")
    ours = checked(int8_bundle, file)
    assert ours and ours.default_options.within(ours.limit)
    use_fusible_layout(file)
    found = checked(int8_bundle, file)
    assert found.default_options.options == {} and found.bundle_options.options
    assert found, "under the bundle's options the layout changes nothing"
    assert not found.default_options.within(10 * found.limit)


def test_positions_are_fed_where_they_are_an_input(tiny_bundle: Path, tmp_path: Path) -> None:
    file = merged(tiny_bundle, tmp_path / "m", "optimum")
    assert "position_ids" in {value.name for value in ir.load(file).graph.inputs}
    assert checked(tiny_bundle, file)


def test_shared_buffers(tiny_lowered: Path, tmp_path: Path) -> None:
    file = merged(tiny_lowered, tmp_path / "m", "genai")
    source = Bundle.open(tiny_lowered, verify=False)
    cases = plan_cases(64, (), 257, ("right",))
    assert check_merged(source, file, cases, ())
    damaged = tmp_path / "damaged"
    shutil.copytree(file.parent, damaged)
    change(damaged / "model.onnx", "lm_head.weight", 1.01)
    assert not check_merged(source, damaged / "model.onnx", cases, ())
