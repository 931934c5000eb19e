"""Pruning bundles whose heads are not of the vocabulary, or keep it in clusters."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle
from headport.errors import QuantizeError
from headport.export.command import Options as ExportOptions
from headport.export.command import export
from headport.export.heads import ValueHead, VocabularyHead
from headport.quantize.prune import Options, prune
from headport.quantize.prune.task_heads import renumbered
from headport.runtime import Heads
from headport.selftest import run_selftest
from tests.conftest import TEXTS, llama_config, save_model, save_tokenizer
from tests.head_models import HIDDEN, randomise, save_modules

WIDE = 300
PAD = 0  # of the tiny model; also its end token


def test_heads_that_keep_tokens_in_clusters_are_refused(headed_bundle, tmp_path):
    with pytest.raises(QuantizeError, match="frequent, tree keep their tokens in clusters"):
        prune(Options(bundle=headed_bundle, output=tmp_path / "p", corpus=("README.md",)))


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with 300 tokens, a value per text and a second head over the vocabulary."""
    folder = tmp_path_factory.mktemp("wider")
    checkpoint = save_model(folder / "c", llama_config(vocab_size=WIDE, num_hidden_layers=1))
    save_tokenizer(checkpoint, WIDE)
    modules = {
        "whole": randomise(ValueHead(HIDDEN, pooling="last", pad_id=PAD), 7),
        "later": randomise(VocabularyHead(HIDDEN, WIDE, blocks=1), 8),
    }
    heads = tuple(save_modules(folder, modules))
    return export(ExportOptions(model=str(checkpoint), output=folder / "b", head=heads))


@pytest.mark.parametrize("mode", ["output", "both"])
def test_other_heads_answer_as_before(wider, tmp_path, mode):
    text = tmp_path / "text.txt"
    text.write_text(TEXTS[0])
    pruned = prune(
        Options(bundle=wider.path, output=tmp_path / "p", corpus=(str(text),), mode=mode, least=0)
    )
    assert run_selftest(pruned)
    before, after = Heads(wider, threads=1), Heads(pruned, threads=1)
    kept = pruned.manifest.heads["later"].vocab_size
    assert kept < WIDE
    words = ["The last matrix", "a head"]
    a, b = before.encode(words), after.encode(words)
    for old, new in zip(before.values(a), after.values(b), strict=True):
        assert np.allclose(old, new, atol=1e-5)
    for old, new in zip(before.logits(a, "later"), after.logits(b, "later"), strict=True):
        finite = np.isfinite(new)
        if mode == "output":
            assert finite[0].sum() == kept and np.allclose(new[finite], old[finite], atol=1e-4)
        else:
            assert new.shape[1] == kept


def test_a_padding_token_gets_its_new_id(wider):
    head = msgspec.structs.replace(wider.manifest.task_heads["whole"], pad_id=9)
    manifest = msgspec.structs.replace(wider.manifest, task_heads={"whole": head})
    found = renumbered(manifest, np.array([3, 5, 9, 11]))
    assert found["whole"].pad_id == 2
    with pytest.raises(QuantizeError, match="its padding token 9, which would not be kept"):
        renumbered(manifest, np.array([3, 5]))
