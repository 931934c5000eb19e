"""A bundle without files of graphs, and a runner whose logits come from a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headport.bundle import Bundle
from headport.manifest import (
    CandidateForm,
    Graph,
    Head,
    License,
    Manifest,
    Model,
    Provenance,
    Vocabulary,
)
from headport.runner import Candidates, HeadOutput, QuantisedLogits
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

    def reorder(self, source_rows: np.ndarray) -> None:
        self.lengths = self.lengths[source_rows]


class TableSlots:
    divisible = movable = True
    nbytes = 0

    def __init__(self, runner: TableRunner, count: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = np.zeros(count, np.int64)
        self._runner = runner

    def forward(self, rows: Any, token_ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        rows = list(rows)
        assert rows == sorted(set(rows)) and (lengths >= 1).all()
        assert (self.lengths[rows] + lengths <= self.capacity).all()
        self._runner.steps.append(dict(zip(rows, lengths.tolist(), strict=True)))
        hidden = self._runner.hidden(self.lengths[rows], token_ids, lengths)
        self.lengths[rows] += lengths
        return hidden

    def cut(self, slot: int, length: int) -> None:
        assert 0 <= length <= self.lengths[slot]
        self.lengths[slot] = length

    def copy(self, source: int, target: int, length: int) -> None:
        assert source != target and 0 <= length <= self.lengths[source]
        self.lengths[target] = length


class TableRunner:
    """Logits after a token are `table[token] * (1 + position / 100)`; rows know nothing of others.

    With `count` it gives that many candidates, picked by logit + noise, all of them proved but for
    the noise; `doubt` adds to what all others may reach.
    """

    def __init__(self, table: np.ndarray, count: int | None = None, doubt: float = 0.0) -> None:
        self.table = table.astype(np.float32)
        self.count = count
        self.doubt = doubt
        self.runs = 0
        self.full_rows = 0
        self.steps: list[dict[int, int]] = []  # of the slots: new tokens by slot

    def new_cache(self, batch_size: int, capacity: int) -> TableCache:
        return TableCache(batch_size, capacity)

    def forward(self, cache: Any, token_ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        assert (cache.lengths + lengths <= cache.capacity).all()
        found = self.hidden(cache.lengths, token_ids, lengths)
        cache.lengths = cache.lengths + lengths
        return found

    def new_slots(self, count: int, capacity: int) -> TableSlots:
        return TableSlots(self, count, capacity)

    def hidden(self, held: np.ndarray, token_ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        positions = held[:, None] + np.arange(token_ids.shape[1])
        self.runs += 1
        hidden = np.stack([token_ids, positions], axis=-1).astype(np.float32)
        hidden[np.arange(token_ids.shape[1]) >= lengths[:, None]] = np.nan  # unspecified entries
        return hidden

    def reorder(self, cache: Any, source_rows: np.ndarray) -> None:
        cache.reorder(source_rows)

    def full_logits(self, hidden_states: np.ndarray, name: str = "lm") -> np.ndarray:
        assert name == "lm"
        self.full_rows += len(hidden_states)
        return self._logits(hidden_states)

    def _logits(self, hidden_states: np.ndarray) -> np.ndarray:
        token_ids, positions = hidden_states[:, 0].astype(np.int64), hidden_states[:, 1]
        return self.table[token_ids] * (1 + positions[:, None] / 100).astype(np.float32)

    def quantised(self, hidden_states: np.ndarray, name: str = "lm") -> QuantisedLogits:
        logits = self._logits(hidden_states)
        return QuantisedLogits(logits, logits + np.float32(self.doubt))

    def rescored_logits(self, hidden_states: np.ndarray, name: str = "lm") -> np.ndarray:
        return self._logits(hidden_states)

    def head(
        self, hidden_states: np.ndarray, name: str = "lm", noise: np.ndarray | None = None
    ) -> HeadOutput:
        assert name == "lm"
        logits = self._logits(hidden_states)
        if self.count is None:
            return HeadOutput(logits, None)
        keys = logits.astype(np.float64) + (0.0 if noise is None else noise)
        order = np.argsort(-keys, axis=1, kind="stable")
        cut = np.full(len(logits), -np.inf)
        if self.count < logits.shape[1]:
            cut = np.take_along_axis(keys, order[:, [self.count]], axis=1)[:, 0] + self.doubt
        ids = np.sort(order[:, : self.count], axis=1)
        values = np.take_along_axis(logits, ids, axis=1).astype(np.float64)
        rank = np.argsort(-values, axis=1, kind="stable")
        values = np.take_along_axis(values, rank, axis=1)
        proved = (values > cut[:, None]).sum(axis=1) if noise is None else np.zeros(len(logits))
        return HeadOutput(
            None,
            Candidates(
                np.take_along_axis(ids, rank, axis=1),
                values,
                np.log(np.exp(logits.astype(np.float64)).sum(axis=1)),
                proved.astype(np.int64),
                cut,
                np.zeros(len(logits)),
            ),
        )


def manifest(**changes: Any) -> Manifest:
    found = Manifest(
        schema_version=1,
        license=License(id=None, source="none", files=()),
        provenance=Provenance(checkpoint="table", format="none", sha256="0", stages=()),
        model=Model(architecture="Table", hidden_size=2, layers=0, max_context=64, dtype="fp32"),
        graphs={"backbone": Graph(file="none", role="backbone", inputs=(), outputs=())},
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
    """`make(table=…, count=…, doubt=…, folder=…, **manifest changes)` → a generator over the table.

    With `count` its head gives that many candidates, certified unless `certified` is false.
    """

    def build(
        rows: np.ndarray = table,
        *,
        count: int | None = None,
        doubt: float = 0.0,
        certified: bool = True,
        folder: Path = bundle_folder,
        options: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Generator:
        found = manifest(**changes)
        if count is not None:
            form = CandidateForm(
                count=count,
                certified=certified,
                bound="block" if certified else None,
                full="head.lm.full",
                original="none",
                original_tied=False,
            )
            head = msgspec.structs.replace(
                found.heads["lm"],
                outputs="candidates",
                candidates=form,
                vocab_size=rows.shape[1],
            )
            found = msgspec.structs.replace(found, heads={"lm": head})
        runner = TableRunner(rows, count, doubt)
        return Generator(Bundle(folder, found), runner=runner, **(options or {}))

    return build


@pytest.fixture(scope="session")
def make_bundle(bundle_folder: Path) -> Callable[..., Bundle]:
    """`make_bundle(folder=…, **manifest changes)` → a bundle without graphs."""
    return lambda folder=bundle_folder, **changes: Bundle(folder, manifest(**changes))
