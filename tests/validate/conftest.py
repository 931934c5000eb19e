"""Texts, checkpoints with unusual heads, and reference processes that serve all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import VOCAB_SIZE, save_model

PROSE = """\
A head is the last matrix of a language model: it turns a hidden state into one logit per token.
Rounding its weights moves every logit a little, and a few tokens change their order.

Short block.

How far the answers moved is a question of numbers, not of taste. The reference says which
token follows and how sure it is; the candidate says the same, and the two are held together.
"""
CODE = """\
def add(a: int, b: int) -> int:
    return a + b


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def step(self, by: int = 1) -> int:
        self.count += by
        return self.count


if __name__ == "__main__":
    print("naïve café, 中文 and emoji 🙂", Counter().step(add(2, 3)))
"""


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A prose text and a program."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "prose.txt").write_text(PROSE, encoding="utf-8")
    (folder / "code.py").write_text(CODE, encoding="utf-8")
    return folder / "prose.txt", folder / "code.py"


@pytest.fixture(scope="session")
def reference_of() -> Callable[[Path], Any]:
    """The reference of a checkpoint, loaded once, without its process."""

    @cache
    def load(checkpoint: Path) -> Any:
        from headport.validate.local_reference import LocalReference
        from headport.validate.reference import Reference

        return LocalReference(Reference(str(checkpoint)))

    return load


def _small(**changes: Any) -> dict[str, Any]:
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return settings | changes


@pytest.fixture(scope="session")
def tiny_phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose head has a bias."""
    from transformers import PhiConfig

    config = PhiConfig(**_small(), tie_word_embeddings=False)
    return save_model(tmp_path_factory.mktemp("checkpoint") / "phi", config)


@pytest.fixture(scope="session")
def tiny_cohere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose logits are scaled by 0.5 after the head's product."""
    from transformers import CohereConfig

    config = CohereConfig(**_small(logit_scale=0.5))
    return save_model(tmp_path_factory.mktemp("checkpoint") / "cohere", config)


@pytest.fixture(scope="session")
def phi_bundle(tiny_phi: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle of `tiny_phi`."""
    return export_to(tiny_phi, tmp_path_factory.mktemp("bundle") / "phi")


@pytest.fixture(scope="session")
def cohere_bundle(tiny_cohere: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle of `tiny_cohere`."""
    return export_to(tiny_cohere, tmp_path_factory.mktemp("bundle") / "cohere")


@pytest.fixture(scope="session")
def gemma_bundle(tiny_gemma2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle of `tiny_gemma2`."""
    return export_to(tiny_gemma2, tmp_path_factory.mktemp("bundle") / "gemma2")


def export_to(checkpoint: Path, output: Path) -> Path:
    from headport.export.command import Options, export

    return export(Options(model=str(checkpoint), output=output)).path
