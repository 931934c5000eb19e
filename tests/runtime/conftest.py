"""A bundle without graphs, and a runner whose logits come from a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headport.bundle import Bundle
from headport.manifest import Head, License, Manifest, Model, Provenance, Vocabulary
from headport.runner import Candidates, HeadOutput
from headport.runtime import Generator

BYTES = 256  # ids 0 … 255 are single bytes, in the order of the byte alphabet
END = 256
VOCAB_SIZE = 257


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return inner


class TableCache:
    def __init__(self, batch_size: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = np.zeros(batch_size, np.int64)


class TableRunner:
    """Logits after a token are `table[token] * (1 + position / 100)`; rows know nothing of others.

    With `certified` it gives candidates: all ids sorted, of which that many are proved.
    """

    def __init__(self, table: np.ndarray, certified: int | None = None) -> None:
        self.table = table.astype(np.float32)
        self.certified = certified
        self.runs = 0
        self.lengths: list[list[int]] = []

    def new_cache(self, batch_size: int, capacity: int) -> TableCache:
        return TableCache(batch_size, capacity)

    def forward(self, cache: Any, token_ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        assert (cache.lengths + lengths <= cache.capacity).all()
        positions = cache.lengths[:, None] + np.arange(token_ids.shape[1])
        cache.lengths = cache.lengths + lengths
        self.runs += 1
        self.lengths.append(lengths.tolist())
        hidden = np.stack([token_ids, positions], axis=-1).astype(np.float32)
        hidden[np.arange(token_ids.shape[1]) >= lengths[:, None]] = np.nan  # unspecified entries
        return hidden

    def head(self, hidden_states: np.ndarray, name: str = "lm") -> HeadOutput:
        assert name == "lm"
        token_ids, positions = hidden_states[:, 0].astype(np.int64), hidden_states[:, 1]
        logits = self.table[token_ids] * (1 + positions[:, None] / 100).astype(np.float32)
        if self.certified is None:
            return HeadOutput(logits, None)
        ids = np.argsort(-logits, axis=1, kind="stable")
        return HeadOutput(
            None,
            Candidates(
                ids,
                np.take_along_axis(logits, ids, axis=1),
                np.log(np.exp(logits).sum(axis=1)),
                np.full(len(logits), self.certified, np.int64),
            ),
        )


def manifest(**changes: Any) -> Manifest:
    found = Manifest(
        schema_version=1,
        license=License(id=None, source="none", files=()),
        provenance=Provenance(checkpoint="table", format="none", sha256="0", stages=()),
        model=Model(architecture="Table", hidden_size=2, layers=0, max_context=64, dtype="fp32"),
        graphs={},
        heads={
            "lm": Head(
                graph="head.lm",
                outputs="logits",
                vocab_size=VOCAB_SIZE,
                scale=1.0,
                softcap=None,
                bias=False,
                weight="none",
                tied=False,
                quantization=None,
            )
        },
        tensors=(),
        vocabulary=Vocabulary(size=VOCAB_SIZE, padded_size=VOCAB_SIZE, kept_size=None, map=None),
        defaults={"eos_token_id": END},
        session_options={},
        target="portable",
        selftest=None,
        files={},
    )
    return msgspec.structs.replace(found, **changes)


@pytest.fixture(scope="session")
def bundle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def table() -> np.ndarray:
    """Random logits [V, V], spread like those of a model; the end token is unlikely but real."""
    found = np.random.default_rng(0).normal(size=(VOCAB_SIZE, VOCAB_SIZE)) * 3
    found[:, END] = -2.0
    return found


Make = Callable[..., Generator]


@pytest.fixture
def make(bundle_folder: Path, table: np.ndarray) -> Make:
    """`make(table=…, certified=…, folder=…, **manifest changes)` → a generator over the table."""

    def build(
        rows: np.ndarray = table,
        *,
        certified: int | None = None,
        folder: Path = bundle_folder,
        options: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Generator:
        bundle = Bundle(folder, manifest(**changes))
        return Generator(bundle, runner=TableRunner(rows, certified), **(options or {}))

    return build


@pytest.fixture(scope="session")
def make_bundle(bundle_folder: Path) -> Callable[..., Bundle]:
    """`make_bundle(folder=…, **manifest changes)` → a bundle without graphs."""
    return lambda folder=bundle_folder, **changes: Bundle(folder, manifest(**changes))
