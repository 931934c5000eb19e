"""Pruning what an encoder-decoder bundle writes: sources are read as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle
from headport.errors import ParityError, QuantizeError, UsageError
from headport.export.command import Options as Exporting
from headport.export.command import export
from headport.quantize.prune import Options, check, command, prune
from headport.runtime import Generator
from headport.selftest import run_selftest
from headport.vocabulary_map import read_map
from tests.conftest import save_tokenizer
from tests.sourced.models import END, START, save_sourced

SIZE, FORCED = 300, 291


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BART with a vocabulary that holds more than bytes."""
    folder = tmp_path_factory.mktemp("whole")
    model = save_sourced(folder / "model", "bart", vocab_size=SIZE, decoder_layers=1)
    save_tokenizer(model, SIZE)
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"forced_bos_token_id": FORCED}))
    return export(Exporting(model=str(model), output=folder / "bundle")).path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "pairs.jsonl"
    file.write_text(json.dumps({"source": "the token of the head", "target": "A head."}))
    return file


def options(whole: Path, output: Path, corpus: Path, **changes: Any) -> Options:
    return Options(
        bundle=whole, output=output, corpus=(str(corpus),), field="target", least=0, **changes
    )


@pytest.fixture(scope="module")
def pruned(whole: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return prune(options(whole, tmp_path_factory.mktemp("pruned") / "b", corpus))


def test_the_head_is_cut_and_what_starts_a_reply_stays(whole, pruned):
    before, manifest = Bundle.open(whole).manifest, pruned.manifest
    kept = read_map(pruned)
    assert kept is not None
    assert {START, END, FORCED} <= set(kept.tolist()) and len(kept) < SIZE
    assert manifest.heads["lm"].vocab_size == len(kept) and not manifest.heads["lm"].tied
    shapes = {(t.name, t.shape) for t in before.tensors if "head.lm:" not in str(t.consumers)}
    assert shapes <= {(t.name, t.shape) for t in manifest.tensors}
    report = manifest.provenance.stages[-1].report["check"]
    assert report["hidden_states_bit_equal"] and report["logits"] > 0
    assert report["max_abs_logit_error"] < 1e-4
    assert run_selftest(pruned)


def test_replies_are_those_of_the_whole_head_among_what_was_kept(whole, pruned):
    kept = read_map(pruned)
    rng = np.random.default_rng(4)
    sources = [rng.integers(3, SIZE, n).tolist() for n in (3, 17, 9)]
    assert any(i not in kept for ids in sources for i in ids), "removed tokens can be read"
    with Generator(whole, threads=1) as all_of_it, Generator(pruned, threads=1) as part:
        for more in ({}, {"temperature": 0.9, "seed": 2}, {"num_beams": 3}):
            settings: dict[str, Any] = {"max_new_tokens": 8, **more}
            limited = settings | ({} if "num_beams" in more else {"allowed": kept.tolist()})
            wanted = [r.token_ids for r in all_of_it.generate(sources, **limited)]
            found = [r.token_ids for r in part.generate(sources, **settings)]
            assert {i for ids in found for i in ids} <= set(kept.tolist())
            if "num_beams" not in more:
                assert found == wanted
            assert all(ids[0] == FORCED for ids in found)


def test_a_wrong_row_is_noticed(whole, corpus, tmp_path, monkeypatch):
    read = check.read_examples

    def other(runner: Any, cache: Any, sources: Any) -> None:
        once.append(0)
        read(runner, cache, sources if len(once) > 1 else sources[::-1])

    once: list[int] = []
    monkeypatch.setattr(check, "read_examples", other)
    with pytest.raises(ParityError, match="does not answer for the kept tokens"):
        prune(options(whole, tmp_path / "b", corpus))
    assert len(once) == 2 and not (tmp_path / "b").exists()


def test_what_cannot_be_pruned_is_named(whole, corpus, tmp_path):
    with pytest.raises(UsageError, match=r"encoder-decoder .*--mode both.* use --mode output"):
        prune(options(whole, tmp_path / "b", corpus, mode="both"))
    bundle = Bundle.open(whole)
    alone = Bundle(whole, msgspec.structs.replace(bundle.manifest, source=None))
    with pytest.raises(QuantizeError, match=r"has an encoder .* and no decoder"):
        command._refuse(alone)
