"""Documents whose true figures are known, for `benchmarks.verdict` to draw from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.metrics import score_rows
from headport.validate.figures import FIGURES
from headport.validate.report import Metric
from headport.validate.store import StoredReference
from headport.validate.sums import COLUMNS, DocumentSums, Part, Positions

__all__ = ["Population", "of_reports", "of_store", "simulated"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

# As measured of an INT8 head in blocks of 64 (SmolLM2-135M, 24 documents of English, code and
# medical terms): mean KL 4.4e-4, about half the square of the noise; the logarithm of a document's
# own KL has a standard deviation of 0.22. A tenth of the variance is the same at all positions of
# a document, whose hidden states are alike.
NOISE_RMS, _SHARED, _NOISE_SPREAD = 0.03, 0.1, 0.11
_VOCAB_SIZE, _DOCUMENTS = 512, 1500
_BYTES, _WEIGHT = len(COLUMNS), len(COLUMNS) + 1


@dataclass(frozen=True)
class Population:
    """Sums of documents as validation keeps them."""

    part: Part
    source: str

    @property
    def tokens_per_document(self) -> float:
        """Mean over the documents."""
        return self.part.tokens / len(self.part.counts)

    def truth(self, metric: str) -> float:
        """The figure of the whole population: what draws of it estimate."""
        figure = next(f for f in FIGURES if f.name == metric)
        found: Metric = figure.of(self.part)
        assert found.value is not None
        return found.value

    def words(self) -> str:
        """What it is like."""
        names = ("perplexity_reference", "perplexity_ratio", "kl_mean", "top1_agreement")
        figures = ", ".join(f"{name} {self.truth(name):.6g}" for name in names)
        return (
            f"{len(self.part.counts)} documents of {self.tokens_per_document:.0f} tokens on "
            f"average, {figures}"
        )

    def draw(self, rng: np.random.Generator, documents: int) -> Part:
        """Documents drawn with replacement."""
        at = rng.integers(0, len(self.part.counts), documents)
        return replace(self.part, sums=self.part.sums[at], counts=self.part.counts[at])

    def planted(self, metric: str, value: float) -> Population:
        """The same documents with another truth; their spread stays.

        Perplexity drifts by a constant per token; flips and KL grow by a factor.
        """
        sums, now = self.part.sums.copy(), self.truth(metric)
        places = {name: place for place, name in enumerate(COLUMNS)}
        weights = sums[:, _WEIGHT]
        if metric == "perplexity_ratio":
            sums[:, places["nll_candidate"]] += (math.log(value) - math.log(now)) * weights
        elif metric == "top1_agreement":
            flips = weights - sums[:, places["top1"]]
            sums[:, places["top1"]] = weights - flips * (1 - value) / (1 - now)
        else:
            sums[:, places["kl"]] *= value / now
        return Population(replace(self.part, sums=sums), self.source)


_Block = tuple[Float32, Int64]  # a document's reference logits [N, V], tokens that follow [N]


def simulated(documents: int = _DOCUMENTS, seed: int = 1) -> Population:
    """Documents of a made-up model, with INT8 noise on its logits."""
    rng = np.random.default_rng(seed)
    # Tokens are used by Zipf's law; documents differ in length and in how sure the model is.
    prior = -1.1 * np.log(np.arange(1, _VOCAB_SIZE + 1))
    lengths = np.clip(rng.lognormal(4.9, 0.6, documents).astype(np.int64), 64, 1024)

    def blocks() -> Iterable[_Block]:
        for length in lengths:
            sharpness, calibration = rng.lognormal(0.0, 0.25), rng.normal(1.0, 0.1)
            z = prior + 2.0 * rng.standard_normal((length, _VOCAB_SIZE), np.float32)
            z = (sharpness * z).astype(np.float32)
            gumbel = rng.gumbel(size=z.shape)  # argmax of z + g is a draw from softmax(z)
            yield z, (calibration * z + gumbel).argmax(axis=1)

    return _noisy(blocks(), documents, int(lengths.sum()), rng, "Simulated logits, INT8 noise")


def of_store(folder: Path, seed: int = 1) -> Population:
    """The windows of a stored reference, with INT8 noise on its logits."""
    reference = StoredReference(folder)
    windows = [np.array(w.token_ids, np.int64) for w in reference.store.windows]
    windows = [ids for ids in windows if len(ids) > 1]

    def blocks() -> Iterable[_Block]:
        for ids in windows:
            reference.ask_score(ids)
            for block in reference.read_score(64):
                targets = ids[block.start + 1 : block.start + 1 + len(block.logits)]
                yield block.logits[: len(targets)], targets

    count = sum(-(-len(ids) // 64) for ids in windows)  # pieces of 64 positions are the documents
    tokens = sum(len(ids) - 1 for ids in windows)
    rng = np.random.default_rng(seed)
    return _noisy(blocks(), count, tokens, rng, f"Logits of {folder.name}, INT8 noise")


def _noisy(
    blocks: Iterable[_Block], documents: int, tokens: int, rng: np.random.Generator, source: str
) -> Population:
    sums = DocumentSums(documents, tokens)
    for row, (z, targets) in enumerate(blocks):
        size = NOISE_RMS * rng.lognormal(0.0, _NOISE_SPREAD)
        alone = rng.standard_normal(z.shape, np.float32)
        shared = rng.standard_normal(z.shape[1], np.float32)
        noise = size * (math.sqrt(1 - _SHARED) * alone + math.sqrt(_SHARED) * shared)
        nothing = np.zeros(len(z))
        scores = score_rows(z, (z + noise).astype(np.float32), targets, nothing)
        no = np.zeros(len(z), np.bool_)
        sums.add(scores, Positions(row, 1.0, np.ones(len(z), np.int64), no, no, nothing))
    return Population(_without_percentiles(sums.part()), source)


def _without_percentiles(part: Part) -> Part:
    kept = part.counts > 0
    nothing = {name: values[:0] for name, values in part.kept.items()}
    return Part(part.sums[kept], part.counts[kept], nothing)


def of_reports(files: list[Path]) -> Population:
    """The documents of real reports, with the drift that they have."""
    rows: list[dict[str, Any]] = []
    for file in files:
        rows += json.loads(file.read_text(encoding="utf-8"))["by_document"]
    sums = np.zeros((len(rows), len(COLUMNS) + 2))
    weights = np.array([row["tokens"] * row["weight"] for row in rows])
    names = {"nll_reference": "nll_reference", "nll_candidate": "nll_candidate", "kl": "kl"}
    for place, name in enumerate(COLUMNS):
        if column := (names | {"top1": "top1_agreement"}).get(name):
            sums[:, place] = np.array([row[column] for row in rows]) * weights
    sums[:, _BYTES], sums[:, _WEIGHT] = weights, weights
    part = Part(sums, np.array([row["tokens"] for row in rows]), {})
    return Population(part, "Documents of " + ", ".join(file.name for file in files))
