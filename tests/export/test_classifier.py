"""Decoders that classify: their scores through the runtime against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headport.errors import ExportError, ParityError, RequestError
from headport.export import classifier
from headport.export.command import Options, export, run
from headport.runtime import Generator, Heads
from headport.validate.candidate import Candidate
from tests.conftest import VOCAB_SIZE, llama_config, save_tokenizer
from tests.validate.heads.local import compared_with

TEXTS = [[5, 9, 200, 13], [7, 3], [40, 41, 42, 43, 44, 45, 46, 250, 3]]


def save_classifier(folder: Path, kind: str, **changes: Any) -> Path:
    """A random `LlamaForSequenceClassification` or `…TokenClassification`."""
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, f"LlamaFor{kind}Classification")
    model = made(llama_config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def reference(folder: Path, kind: str, texts: list[list[int]]) -> list[np.ndarray]:
    """What transformers says about each text alone."""
    import transformers

    loader = getattr(transformers, f"AutoModelFor{kind}Classification")
    model = loader.from_pretrained(folder).eval()
    with torch.no_grad():
        return [model(torch.tensor([text])).logits[0].numpy() for text in texts]


def close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 2e-4 * np.abs(expected).max()


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoint and bundle of a classifier with one label; its padding is token 0."""
    folder = tmp_path_factory.mktemp("reward")
    checkpoint = save_classifier(folder / "checkpoint", "Sequence", num_labels=1)
    outcome = run(Options(model=str(checkpoint), output=folder / "bundle"))
    assert "head value: value, one scalar per text, at its last token (padding is token 0)" in (
        outcome.text
    )
    return checkpoint, folder / "bundle"


def test_its_scores_are_validated_on_texts(reward, tmp_path):
    report = compared_with(*reward, tmp_path)
    [found] = report.heads
    assert report and (found.head, found.kind, found.answers) == ("value", "value", 2)


def test_one_label_is_a_value_per_text(reward):
    checkpoint, bundle = reward
    heads = Heads(bundle, threads=1)
    # The last text ends in the padding token, which transformers does not pool at.
    texts = [*TEXTS, [8, 9, 0, 4, 0, 0]]
    found = heads.values(heads.encode(texts))
    for value, expected in zip(found, reference(checkpoint, "Sequence", texts), strict=True):
        close(value, expected)
    assert heads.stats.backbone_runs == 1


def test_padded_rows_of_an_array_are_pooled_before_their_padding(reward):
    _, bundle = reward
    heads = Heads(bundle, threads=1)
    padded = np.zeros((3, 9), np.int64)
    for row, text in zip(padded, TEXTS, strict=True):
        row[: len(text)] = text
    ragged = heads.values(heads.encode(TEXTS))
    assert np.allclose(heads.values(heads.encode(padded)), ragged, atol=1e-5)


def test_it_generates_nothing(reward):
    _, bundle = reward
    with pytest.raises(Exception, match="no head 'lm' in it") as caught:
        Generator(bundle)
    assert "\n" not in str(caught.value)
    from headport.bundle import Bundle

    with pytest.raises(Exception, match="a head 'lm' that gives logits or candidates"):
        Candidate(Bundle.open(bundle), 1)


def test_several_labels_are_a_task_and_padding_needs_a_name(tmp_path):
    labels = {0: "no", 1: "maybe", 2: "yes"}
    settings = {"num_labels": 3, "id2label": labels, "pad_token_id": None}
    checkpoint = save_classifier(tmp_path / "c", "Sequence", **settings)
    bundle = export(Options(model=str(checkpoint), output=tmp_path / "b", head=("answer=auto",)))
    assert bundle.manifest.task_heads["answer"].pad_id is None
    heads = Heads(bundle, threads=1)
    found = heads.tasks(heads.encode(TEXTS), head="answer")  # of their own length: no guessing
    for scores, expected in zip(found, reference(checkpoint, "Sequence", TEXTS), strict=True):
        close(scores.scores, expected)
        assert scores.labels == ("no", "maybe", "yes")
        assert scores.best == labels[int(expected.argmax())]
    with pytest.raises(RequestError, match="the model names no padding token"):
        heads.tasks(heads.encode(np.array([[5, 9, 0], [7, 0, 0]])))


def test_scores_per_token(tmp_path):
    checkpoint = save_classifier(tmp_path / "c", "Token", num_labels=1)
    bundle = export(Options(model=str(checkpoint), output=tmp_path / "b"))
    assert bundle.manifest.task_heads["value"].head.bias
    heads = Heads(bundle, threads=1)
    found = heads.values(heads.encode(TEXTS))
    for value, expected in zip(found, reference(checkpoint, "Token", TEXTS), strict=True):
        close(value, expected[:, 0])


def test_parity_fails_where_the_layer_is_another(reward, tmp_path, monkeypatch):
    checkpoint, _ = reward
    copy = classifier._module

    def wrong(*arguments: Any) -> Any:
        made = copy(*arguments)
        with torch.no_grad():
            made.summary.weight[0, 5] += 0.1
        return made

    monkeypatch.setattr(classifier, "_module", wrong)
    with pytest.raises(ParityError, match="head value: the written files do not answer"):
        export(Options(model=str(checkpoint), output=tmp_path / "out"))


def test_a_rule_of_pooling_that_is_another_is_refused(reward, tmp_path, monkeypatch):
    checkpoint, _ = reward
    monkeypatch.setattr(classifier, "last_token", lambda ids, _: 0)
    with pytest.raises(ExportError, match="not the one at its last token"):
        export(Options(model=str(checkpoint), output=tmp_path / "out"))


def test_a_padding_token_that_does_not_exist(tmp_path):
    checkpoint = save_classifier(tmp_path / "c", "Sequence", num_labels=1, pad_token_id=-1)
    with pytest.raises(ExportError, match="its padding token -1 is none of its 257 tokens"):
        export(Options(model=str(checkpoint), output=tmp_path / "out"))


def test_an_encoder_that_classifies_is_refused(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path / "c")
    save_tokenizer(tmp_path / "c")
    with pytest.raises(ExportError, match="a decoder whose last layer is one linear `score`"):
        export(Options(model=str(tmp_path / "c"), output=tmp_path / "out"))
