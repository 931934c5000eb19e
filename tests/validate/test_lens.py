"""Layers of the reference read through its own head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headport.errors import UsageError
from headport.validate.analysis.command import Options, analyse_with
from headport.validate.analysis.lens import look
from headport.validate.analysis.tables import render_lines, render_page
from headport.validate.layers import LayerWatch
from headport.validate.lens import read_layers

IDS = list(range(20, 32))


@pytest.mark.parametrize("checkpoint", ["tiny_llama", "tiny_gemma2", "tiny_cohere"])
def test_each_layer_goes_through_the_models_own_norm_and_head(
    checkpoint: str, reference_of: Callable[[Path], Any], request: pytest.FixtureRequest
) -> None:
    model = reference_of(request.getfixturevalue(checkpoint)).inner.model
    token_ids = torch.tensor([IDS])
    found = read_layers(model, token_ids)
    assert found is not None
    with torch.inference_mode():
        output = model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
        states = output.hidden_states
        # transformers shows the last state after the norm, all others before it.
        logits = model.lm_head(model.model.norm(states[0]))
        if checkpoint == "tiny_gemma2":
            logits = torch.tanh(logits / 1.0) * 1.0
        if checkpoint == "tiny_cohere":
            logits = logits * 0.5
    assert len(found) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(found[0], torch.log_softmax(logits[0], -1), rtol=0, atol=1e-4)
    whole = torch.log_softmax(output.logits[0], -1)
    torch.testing.assert_close(found[-1], whole, rtol=0, atol=1e-4)


def test_stages_beyond_one_batch(
    tiny_llama: Path, reference_of: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reference_of(tiny_llama).inner.model
    at_once = read_layers(model, torch.tensor([IDS]))
    monkeypatch.setattr("headport.validate.lens._STAGES_AT_ONCE", 2)
    in_parts = read_layers(model, torch.tensor([IDS]))
    assert at_once is not None and in_parts is not None
    torch.testing.assert_close(at_once, in_parts)


def test_a_model_that_says_more_than_its_last_layer_is_not_read(
    tiny_llama: Path, reference_of: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reference_of(tiny_llama).inner.model
    seen = iter([1.0, 5.0, 5.0])  # what is added to the logits of each run
    hook = model.lm_head.register_forward_hook(lambda m, a, output: output + next(seen) * output)
    try:
        assert read_layers(model, torch.tensor([IDS])) is None
    finally:
        hook.remove()
    monkeypatch.setattr(LayerWatch, "states", lambda *_: None)
    assert read_layers(model, torch.tensor([IDS])) is None


def test_what_is_shown(tiny_llama: Path, reference_of: Callable[[Path], Any]) -> None:
    reference = reference_of(tiny_llama)
    found = look(reference, IDS, 3, str)
    assert found.positions == len(IDS) and found.tokens == ("29", "30", "31")
    assert [layer.after for layer in found.layers] == ["the embedding", "layer 0", "layer 1"]
    logits = reference.inner.model(input_ids=torch.tensor([IDS])).logits[0, -3:]
    assert found.layers[-1].choices == tuple(map(str, logits.argmax(-1).tolist()))
    assert found.layers[-1].agreement == 1.0
    best = torch.softmax(logits.detach(), -1).max(-1).values.tolist()
    assert found.layers[-1].probabilities == pytest.approx(best, abs=1e-4)
    assert all(0 <= layer.of_final <= 1 for layer in found.layers)
    assert found.layers[0].of_final < found.layers[-1].of_final


def test_long_texts_are_cut(tiny_llama: Path, reference_of: Callable[[Path], Any]) -> None:
    found = look(reference_of(tiny_llama), [*IDS, *IDS, *IDS], 2, str)
    assert found.positions == 32 and found.tokens == ("26", "27")


def test_a_model_without_layers(
    tiny_llama: Path, reference_of: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headport.validate.reference.read_layers", lambda *_: None)
    with pytest.raises(UsageError, match=r"--lens: LlamaForCausalLM shows no single state"):
        look(reference_of(tiny_llama), IDS, 2, str)


def test_it_stands_in_the_analysis(
    tiny_bundle: Path,
    tiny_llama: Path,
    texts: tuple[Path, ...],
    reference_of: Callable[[Path], Any],
) -> None:
    options = Options(
        bundle=tiny_bundle,
        reference=str(tiny_llama),
        text=texts,
        max_tokens=60,
        greedy_tokens=0,
        lens=2,
    )
    report = analyse_with(reference_of(tiny_llama), options)
    assert report.lens is not None and len(report.lens.tokens) == 2
    text = render_lines(report)
    assert "logit lens" in text and "the embedding" in text and "layer 1" in text
    assert f"model says at {report.lens.positions} positions" in render_page(report)
    with pytest.raises(UsageError, match="--lens: at most 32 expected, 33 given"):
        analyse_with(reference_of(tiny_llama), _with(options, lens=33))
    with pytest.raises(UsageError, match="--lens: at least 0 expected"):
        analyse_with(reference_of(tiny_llama), _with(options, lens=-1))


def _with(options: Options, **changes: Any) -> Options:
    import msgspec

    return msgspec.structs.replace(options, **changes)
