"""The traced backbone: one attention operator per layer, whichever road the exporter takes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from headport.errors import ExportError
from headport.export import translate
from headport.export.checkpoint import find_checkpoint, load_model
from headport.export.trace import CacheShape, cache_shapes, trace_backbone


def operators(model: ir.Model) -> list[tuple[str, list[str]]]:
    return [(node.op_type, sorted(node.attributes)) for node in model.graph]


def contents(model: ir.Model) -> list[bytes]:
    values = model.graph.initializers.values()
    return sorted(value.const_value.tobytes() for value in values if value.const_value)


def test_a_program_taken_as_it_is_gives_the_same_graph(
    tiny_gemma2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(find_checkpoint(str(tiny_gemma2)))
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers, model.config.layer_types = 1, model.config.layer_types[:1]
    implementation = model.config._attn_implementation
    shapes = cache_shapes(model)
    assert shapes == (CacheShape(2, 16, 16),)
    skipped = []
    skip = translate.skip_decompositions
    monkeypatch.setattr(translate, "skip_decompositions", lambda p: skipped.append(skip(p)) or True)
    quick = trace_backbone(model, shapes)
    assert skipped == [True]
    monkeypatch.setattr(translate, "skip_decompositions", lambda _: False)
    full = trace_backbone(model, shapes)
    assert operators(quick) == operators(full)
    kinds = [op for op, _ in operators(quick)]
    assert kinds.count("CachedAttention_softcap_window") == 1
    # Gemma 2 has four norms per layer and a last one; each is one operator.
    assert kinds.count("RMSNormalization") == 5
    assert contents(quick) == contents(full)
    assert model.config._attn_implementation == implementation  # the model is as it was


def test_what_the_exporter_reuses_changes_nothing(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In half precision, where norms compute in float32, operands are promoted.
    model = load_model(find_checkpoint(str(tiny_llama)), torch.float16)
    shapes = cache_shapes(model)
    reused = trace_backbone(model, shapes)
    monkeypatch.setattr(translate, "known_results_reused", nullcontext)
    computed = trace_backbone(model, shapes)
    assert operators(reused) == operators(computed)
    assert contents(reused) == contents(computed)
    named = [[value.name for value in node.outputs] for node in reused.graph]
    assert named == [[value.name for value in node.outputs] for node in computed.graph]


def test_programs_that_change_their_inputs_are_decomposed() -> None:
    class Counter(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    program = torch.export.export(Counter(), (torch.zeros(2),))
    assert not translate.skip_decompositions(program)


def test_a_model_that_branches_on_its_length_is_refused(tiny_llama: Path) -> None:
    model = load_model(find_checkpoint(str(tiny_llama)))
    inner = model.model.forward

    def branching(input_ids: torch.Tensor, **arguments: object) -> object:
        if input_ids.shape[1] > 16:
            input_ids = input_ids.flip(1)
        return inner(input_ids=input_ids, **arguments)

    model.model.forward = branching
    with pytest.raises(ExportError, match="LlamaForCausalLM"):
        trace_backbone(model, cache_shapes(model))
