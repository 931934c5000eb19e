"""Export of encoder-decoder checkpoints: what is written, what parity notices, what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.errors import CheckpointError, ExportError, HeadportError, ParityError
from headport.export.command import Options, export
from headport.export.encoder_decoder.families import family_of
from headport.export.encoder_decoder.head import probe_decoder_head
from headport.export.encoder_decoder.parity import plan_sources, prove_sources, sourced_logits
from headport.export.encoder_decoder.relative import far_rows, relative_modules, relative_table
from tests.sourced.models import BINS, FRAMES, LONGEST, MAIN, VOCAB_SIZE, load, save_sourced

OTHERS = ("umt5",)  # a table per layer; `benchmarks.encoder_decoder` runs all kinds


def exported(model: Path, output: Path, **options: Any) -> Bundle:
    return export(Options(model=str(model), output=output, **options))


@pytest.mark.parametrize("name", MAIN)
def test_a_bundle_has_encoder_decoder_and_head(name, bundle):
    manifest = Bundle.open(bundle(name)).manifest
    assert {n: g.role for n, g in manifest.graphs.items()} == {
        "encoder": "encoder",
        "backbone": "backbone",
        "head.lm": "head",
    }
    given = {p.name: p.shape for p in manifest.graphs["encoder"].outputs}
    read = {p.name: p.shape for p in manifest.backbone.inputs if p.name.startswith("cross")}
    assert len(read) == 4 and given.keys() == read.keys()
    assert read["cross_key_values.1.value"] == ("source_batch", 4, "source", 8)
    places = FRAMES // 2 if name == "whisper" else "source"
    assert given["cross_key_values.1.value"] == ("source_batch", 4, places, 8)
    assert manifest.model.layers == 2
    parity = manifest.provenance.stages[-1].report["parity"]
    assert set(parity["cases"]) == {
        "prompts_then_steps",
        "one_by_one, sources in one batch",
        "rows of one source",
    }
    assert max(parity["cases"].values()) <= 2e-4 * max(1, parity["max_abs_logit"])


def test_what_lies_between_decoder_and_logits_is_the_heads(bundle):
    heads = {name: Bundle.open(bundle(name)).manifest.heads["lm"] for name in MAIN}
    assert heads["t5"].scale == pytest.approx(32**-0.5, rel=1e-5)
    assert {name: head.bias for name, head in heads.items()} == {
        "t5": False,
        "bart": True,
        "marian": True,
        "whisper": False,
    }
    assert all(head.tied for head in heads.values())


def test_the_manifest_says_what_is_read(bundle):
    declared = {name: Bundle.open(bundle(name)).manifest for name in MAIN}
    assert [declared[n].source.max_length for n in MAIN] == [None, LONGEST, LONGEST, None]
    assert [declared[n].source.vocab_size for n in MAIN] == [VOCAB_SIZE] * 3 + [None]
    [features] = declared["whisper"].graphs["encoder"].inputs
    assert features.shape == ("source_batch", BINS, FRAMES)
    assert [declared[n].model.max_context for n in MAIN] == [2048, LONGEST, LONGEST, LONGEST]


def test_shared_weights_are_stored_once(bundle):
    [shared] = [t for t in Bundle.open(bundle("t5")).manifest.tensors if t.name == "shared.weight"]
    assert {c.split(":")[0] for c in shared.consumers} == {"encoder", "backbone", "head.lm"}


@pytest.mark.parametrize("name", OTHERS)
def test_their_kin_are_exported_too(name, tmp_path):
    report = exported(save_sourced(tmp_path / "model", name), tmp_path / "bundle").manifest
    assert report.provenance.stages[-1].report["parity"]["cases"]


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_half_precision_keeps_what_overflows_in_float32(name, checkpoint, tmp_path):
    found = exported(checkpoint(name), tmp_path / "bundle", dtype="fp16")
    parity = found.manifest.provenance.stages[-1].report["parity"]
    assert max(parity["cases"].values()) <= 2e-2 * max(1, parity["max_abs_logit"])
    kinds = {t.name: t.dtype for t in found.manifest.tensors}
    wide = {n for n, kind in kinds.items() if kind == "float" and "wo" in n.split(".")}
    assert bool(wide) == (name == "t5")


def test_a_head_of_its_own_is_untied_and_scaled_as_the_config_says(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    folder = save_sourced(tmp_path / "model", "t5", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["shared.weight"]) * 0.25
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = load(folder)
    head = probe_decoder_head(model, family_of(type(model).__name__))
    assert not head.tied and head.scale == 1.0
    assert torch.equal(head.weight, weights["lm_head.weight"])


def test_positions_are_read_to_the_end_of_their_tables(bundle):
    model = ir.load(bundle("bart") / "backbone.onnx")
    table = model.graph.initializers["model.decoder.embed_positions.weight"]
    assert table.shape[0] == LONGEST + 2  # BART's first two rows belong to no position


# --- sabotage: each of these must be noticed by the parity run -----------------------------------


def edit(folder: Path, graph: str, change: Callable[[ir.Model], object]) -> None:
    model = ir.load(folder / graph)
    change(model)
    ir.save(model, folder / graph)


def see_padding(model: ir.Model) -> None:
    for function in model.functions.values():
        for node in function:
            if node.op_type == "Where" and function.name.startswith("SourceAttention"):
                node.replace_input_with(2, node.inputs[1])


def swap(first: str, second: str) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        ports = {value.name: value for value in model.graph.outputs}
        ports[first].name, ports[second].name = second, first

    return change


def drop_bias(model: ir.Model) -> None:
    [product] = [node for node in model.graph if node.op_type == "Gemm"]
    product.resize_inputs(2)


def drop_scale(model: ir.Model) -> None:
    scale = model.graph.initializers["scale"]
    scale.const_value = ir.tensor(np.ones_like(scale.const_value.numpy()), name="scale")


def shift_distances(model: ir.Model) -> None:
    [call, *_] = [n for n in model.graph if n.op_type == "CachedAttention_relative"]
    table = call.inputs[-1]
    rolled = np.roll(table.const_value.numpy(), 1, axis=0)
    table.const_value = ir.tensor(rolled, name=table.name)


NAME = "cross_key_values"
SABOTAGES: dict[str, tuple[str, str, Callable[[ir.Model], object]]] = {
    "nothing": ("bart", "head.lm.onnx", lambda model: None),
    "encoder sees padding": ("bart", "encoder.onnx", see_padding),
    "decoder sees padding": ("bart", "backbone.onnx", see_padding),
    "layers swapped": ("whisper", "encoder.onnx", swap(f"{NAME}.0.key", f"{NAME}.1.key")),
    "kinds swapped": ("bart", "encoder.onnx", swap(f"{NAME}.0.key", f"{NAME}.0.value")),
    "no bias": ("marian", "head.lm.onnx", drop_bias),
    "no scale": ("t5", "head.lm.onnx", drop_scale),
    "distances shifted": ("t5", "backbone.onnx", shift_distances),
}


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_parity_notices(sabotage, checkpoint, bundle, tmp_path):
    name, graph, change = SABOTAGES[sabotage]
    folder = shutil.copytree(bundle(name), tmp_path / "bundle")
    edit(folder, graph, change)
    manifest, model = Bundle.open(bundle(name)).manifest, load(checkpoint(name))
    family = family_of(type(model).__name__)
    plan = plan_sources(model, family, manifest.source, manifest.model.max_context)
    reference = sourced_logits(model, family, plan)
    if sabotage == "nothing":
        assert prove_sources(Bundle(folder, manifest), plan, reference).report
        return
    with pytest.raises(ParityError, match="do not answer like the checkpoint"):
        prove_sources(Bundle(folder, manifest), plan, reference)


# --- what is refused -----------------------------------------------------------------------------


def test_separate_vocabularies_are_refused(tmp_path):
    folder = save_sourced(
        tmp_path / "model",
        "marian",
        share_encoder_decoder_embeddings=False,
        decoder_vocab_size=VOCAB_SIZE - 20,
    )
    with pytest.raises(ExportError, match="vocabulary of 257 tokens and writes one of 237"):
        exported(folder, tmp_path / "bundle")


def change_config(folder: Path, **changes: Any) -> Path:
    import json

    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(config))
    return folder


def test_other_classes_are_refused_by_name(tmp_path):
    from transformers import LEDConfig, LEDForConditionalGeneration

    from tests.conftest import save_tokenizer

    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": VOCAB_SIZE}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "attention_window": 4}
    sizes = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    model = LEDForConditionalGeneration(LEDConfig(**small, **heads, **sizes))
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    with pytest.raises(ExportError, match=r"LEDForConditionalGeneration .* supported are T5For"):
        exported(tmp_path / "model", tmp_path / "bundle")


def test_a_class_that_answers_nothing_is_refused(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("t5"), tmp_path / "model")
    change_config(folder, architectures=["T5EncoderModel"])
    with pytest.raises(CheckpointError, match="T5EncoderModel"):
        exported(folder, tmp_path / "bundle")


def test_heads_of_ones_own_are_for_other_models(checkpoint, tmp_path):
    with pytest.raises(ExportError, match=r"--head, or v_head.*encoder-decoder"):
        exported(checkpoint("t5"), tmp_path / "bundle", head=("value=auto",))


def test_a_table_that_ends_early_is_refused(tmp_path):
    folder = save_sourced(tmp_path / "model", "bart")
    with pytest.raises(HeadportError, match=r"embed_positions|does not fit"):
        exported(change_config(folder, max_position_embeddings=64), tmp_path / "bundle")


def test_relative_positions_that_never_end_are_refused():
    import torch

    class Module:
        relative_attention_max_distance = 4

        def compute_bias(self, query: int, key: int) -> Any:
            places = torch.arange(query)
            return (places[:, None] - places[None, :])[None, None].float()

    with pytest.raises(ExportError, match="beyond a distance of 4"):
        relative_table(Module())


def test_a_table_of_both_directions_gives_the_models_own_bias(checkpoint):
    import torch

    [module] = relative_modules(load(checkpoint("t5")).get_encoder())
    bias = far_rows(relative_table(module, both_ways=True))
    with torch.no_grad():
        assert torch.equal(bias(40, 40), module.compute_bias(40, 40))


def test_the_encoder_of_a_batch_pads_what_is_shorter(bundle):
    from headport.runner import open_runner

    runner = open_runner(Bundle.open(bundle("bart")))
    ids = [np.arange(3, 3 + n) for n in (7, 2)]
    together = runner.encoder.encode(ids)
    for source, found in zip(ids, together, strict=True):
        [alone] = runner.encoder.encode([source])
        assert found.length == alone.length == len(source)
        for key, array in found.arrays.items():
            np.testing.assert_allclose(array, alone.arrays[key], atol=2e-5)
    assert runner.encoder.runs == 3
