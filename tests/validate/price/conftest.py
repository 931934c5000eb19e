"""A tiny model whose tokenizer has something to lose, and its pruned bundles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headport.quantize.count.table import write_counts
from headport.quantize.prune import Options, prune
from headport.quantize.prune.tokens import read_tokens
from tests.conftest import llama_config, save_model
from tests.quantize.count.tables import token_counts
from tests.validate.conftest import CODE, PROSE, export_to

COUNTED = PROSE.replace("numbers", "words") * 2
V = 420


def _tokenizer() -> Tokenizer:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=V - 7,  # the head is padded
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator([PROSE, CODE, CODE, PROSE], trainer)
    return found


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoint") / "llama"
    save_model(folder, llama_config(vocab_size=V, num_hidden_layers=1))
    PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), eos_token="<|end|>").save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="session")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_to(checkpoint, tmp_path_factory.mktemp("bundle") / "whole")


@pytest.fixture(scope="session")
def counts(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from headport.bundle import Bundle

    table = read_tokens(Bundle.open(bundle))
    values = np.bincount(table.encode(COUNTED), minlength=V)
    file = tmp_path_factory.mktemp("counts") / "counts.parquet"
    found = {i: n for i, n in enumerate(values.tolist()) if n}
    write_counts(file, token_counts(found, V, tokenizer_sha256=table.sha256), force=False)
    return file


@pytest.fixture(scope="session")
def pruned(
    bundle: Path, counts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Makes a pruned bundle."""

    def make(mode: str, **options: Any) -> Path:
        output = tmp_path_factory.mktemp("pruned") / mode
        made = Options(bundle=bundle, output=output, counts=counts, mode=mode, least=1, **options)
        return prune(made).path

    return make
