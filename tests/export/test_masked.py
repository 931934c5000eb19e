"""Models that fill in masked tokens, through the runtime against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headport.bundle import Bundle
from headport.errors import BundleError, HeadportError, ParityError, PromptError, UsageError
from headport.export import encoder_trace, masked
from headport.export.command import Options, export
from headport.inspection import describe
from headport.lowering.command import Options as LowerOptions
from headport.lowering.command import lower
from headport.quantize.command import Options as QuantizeOptions
from headport.quantize.command import quantize
from headport.runtime import Generator, Heads
from headport.selftest import run_selftest
from tests.conftest import VOCAB_SIZE, save_tokenizer
from tests.head_models import randomise, save_modules
from tests.validate.heads.local import compared_with

MASK = 256
TEXTS = [[5, 9, MASK, 13], [7, MASK], [40, 41, 42, MASK, 44, MASK, 46, 250, 3]]
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES))


def _roberta() -> Any:
    from transformers import RobertaConfig, RobertaForMaskedLM

    changes = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    return RobertaForMaskedLM(RobertaConfig(**SIZES | changes, tie_word_embeddings=False))


def _distilbert() -> Any:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    return DistilBertForMaskedLM(
        DistilBertConfig(
            vocab_size=VOCAB_SIZE,
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=48,
            max_position_embeddings=40,
        )
    )


def _esm() -> Any:
    """Its head's bias lies outside the linear layer."""
    from transformers import EsmConfig, EsmForMaskedLM

    changes = {"mask_token_id": MASK, "position_embedding_type": "absolute", "pad_token_id": 1}
    return EsmForMaskedLM(EsmConfig(**SIZES | changes, token_dropout=False))


FAMILIES = {"bert": _bert, "roberta": _roberta, "distilbert": _distilbert, "esm": _esm}


def save_masked(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 1.0)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def reference(folder: Path) -> list[tuple[np.ndarray, torch.Tensor]]:
    """Logits and the encoder's hidden states of each text alone, from transformers."""
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    found = []
    with torch.no_grad():
        for text in TEXTS:
            out = model(torch.tensor([text]), output_hidden_states=True)
            found.append((out.logits[0].numpy(), out.hidden_states[-1][0]))
    return found


def close(found: np.ndarray, expected: np.ndarray, relative: float = 2e-4) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= relative * np.abs(expected).max()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bundle]:
    folder = tmp_path_factory.mktemp("bert")
    checkpoint = save_masked(folder / "checkpoint", "bert")
    from headport.export.heads import ValueHead

    [spec] = save_modules(folder, {"score": randomise(ValueHead(32), 0)})
    bundle = export(Options(model=str(checkpoint), output=folder / "bundle", head=(spec,)))
    return checkpoint, bundle


def test_its_heads_are_validated_on_texts(bert, tmp_path):
    checkpoint, bundle = bert
    spec = f"score={checkpoint.parent / 'score.safetensors'}"
    report = compared_with(checkpoint, bundle.path, tmp_path, spec)
    assert report and [(f.head, f.kind) for f in report.heads] == [
        ("mlm", "vocabulary"),
        ("score", "value"),
    ]
    with pytest.raises(UsageError, match=r"head score is none of the reference's \(mlm\); pass"):
        compared_with(checkpoint, bundle.path, tmp_path)


# Positions of two of them begin behind the padding token's, so they read two tokens less.
@pytest.mark.parametrize(("family", "context"), [("roberta", 38), ("distilbert", 40), ("esm", 38)])
def test_families(family, context, tmp_path):
    checkpoint = save_masked(tmp_path / "c", family)
    bundle = export(Options(model=str(checkpoint), output=tmp_path / "b"))
    assert bundle.manifest.heads["mlm"].bias and bundle.manifest.model.max_context == context
    heads = Heads(bundle, threads=1)
    for found, (expected, _) in zip(
        heads.logits(heads.encode(TEXTS)), reference(checkpoint), strict=True
    ):
        close(found, expected)


def test_a_batch_of_texts_of_different_lengths_at_the_masked_positions(bert):
    checkpoint, bundle = bert
    heads = Heads(bundle, threads=1)
    states = heads.encode(TEXTS)
    masks = states.where(MASK)
    assert masks == [[2], [1], [3, 5]]
    found = heads.logits(states, positions=masks)
    best = heads.predict(states, positions=masks)
    for logits, ids, places, (expected, _) in zip(
        found, best, masks, reference(checkpoint), strict=True
    ):
        close(logits, expected[places])
        assert (ids == expected[places].argmax(axis=1)).all()
    assert heads.stats.backbone_runs == 1


def test_another_head_on_the_encoder(bert):
    from headport.export.heads import ValueHead

    checkpoint, bundle = bert
    heads, module = Heads(bundle, threads=1), randomise(ValueHead(32), 0)
    states = heads.encode(TEXTS)
    for found, (_, hidden) in zip(heads.values(states), reference(checkpoint), strict=True):
        close(found, module(hidden).detach().numpy())


def test_inspect_and_selftest(bert):
    _, bundle = bert
    assert bundle.manifest.heads["mlm"].tied and bundle.manifest.model.max_context == 40
    result = run_selftest(bundle)
    assert result and set(result.logits_error) == {"mlm"}
    text = describe(bundle, result).text()
    assert "[257, hidden] logits, not quantised, after the graph head.mlm.states" in text
    assert "logits max |Δ| mlm" in text


def test_the_vocabulary_matrix_can_be_quantised(bert, tmp_path):
    checkpoint, bundle = bert
    smaller = quantize(
        QuantizeOptions(bundle=bundle.path, output=tmp_path / "q", head="int8", block=16)
    )
    entry = smaller.manifest.heads["mlm"]
    assert entry.quantization is not None and entry.transform == "head.mlm.states"
    heads = Heads(smaller, threads=1)
    for found, (expected, _) in zip(
        heads.logits(heads.encode(TEXTS)), reference(checkpoint), strict=True
    ):
        close(found, expected, 2e-2)
        assert np.abs(found - expected).max() > 1e-4


def test_half_precision(tmp_path):
    checkpoint = save_masked(tmp_path / "c", "bert")
    bundle = export(Options(model=str(checkpoint), output=tmp_path / "b", dtype="fp16"))
    heads = Heads(bundle, threads=1)
    for found, (expected, _) in zip(
        heads.logits(heads.encode(TEXTS)), reference(checkpoint), strict=True
    ):
        close(found, expected, 2e-2)


def test_what_works_token_by_token_is_refused_by_name(bert, tmp_path):
    _, bundle = bert
    refusals = (
        lambda: Generator(bundle, head="mlm"),
        lambda: lower(LowerOptions(bundle=bundle.path, output=tmp_path / "l", target="ort-cpu")),
        lambda: quantize(
            QuantizeOptions(bundle=bundle.path, output=tmp_path / "q", backbone="int8")
        ),
    )
    for ask in refusals:
        with pytest.raises(HeadportError, match="the bundle of an encoder") as caught:
            ask()
        assert "\n" not in str(caught.value)


def test_padding_is_not_read(bert):
    _, bundle = bert
    heads = Heads(bundle, threads=1)
    with pytest.raises(PromptError, match="would read the padding of an array"):
        heads.encode(np.array([[5, 9, 0], [7, 0, 0]]))
    with pytest.raises(PromptError, match="have \\[41\\] tokens, the context holds 40"):
        heads.encode([[1] * 41])


def test_parity_fails_where_the_mask_is_ignored(bert, tmp_path, monkeypatch):
    checkpoint, _ = bert
    whole = encoder_trace._Encoder.forward

    def blind(self: Any, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return whole(self, source, torch.ones_like(mask))

    monkeypatch.setattr(encoder_trace._Encoder, "forward", blind)
    with pytest.raises(ParityError, match="texts_of_different_lengths differs by"):
        export(Options(model=str(checkpoint), output=tmp_path / "out"))


def test_parity_fails_where_the_layers_before_the_matrix_are_left_out(bert, tmp_path, monkeypatch):
    checkpoint, _ = bert
    monkeypatch.setattr(masked, "needs_states", lambda *_: False)
    with pytest.raises(ParityError, match="head mlm: the written files do not answer"):
        export(Options(model=str(checkpoint), output=tmp_path / "out"))


def test_a_decoder_is_no_encoder(bert, headed_bundle):
    from headport.encoder_runner import EncoderRunner

    with pytest.raises(BundleError, match="the bundle of an encoder was expected"):
        EncoderRunner(Bundle.open(headed_bundle))
