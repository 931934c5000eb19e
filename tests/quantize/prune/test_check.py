"""The checks after pruning, each proved on a bundle or tokenizer that was damaged on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle, draft_bundle
from headport.errors import ParityError
from headport.graphs import load_graphs, rewrite_bundle
from headport.quantize.prune import Options, prune
from headport.quantize.prune.check import CutTensor, Pruned, check_pruned
from headport.quantize.prune.closure import always_kept
from headport.quantize.prune.rewrite import rewrite_tokenizer
from headport.quantize.prune.selection import Limits, Wanted, select
from headport.quantize.prune.tokenizer_check import check_rewritten
from headport.quantize.prune.tokens import TokenTable, read_tokens
from tests.quantize.prune.tokenizers_of import byte_level
from tests.quantize.prune.toys import count_texts, tokenizer_bundle, write_bundle


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    folder = tmp_path_factory.mktemp("pair")
    source = write_bundle(folder / "toy", byte_level(), bias=True, scale=0.5)
    counts = count_texts(folder / "counts.parquet", source)
    options = Options(
        bundle=source.path, output=folder / "out", counts=counts, least=1, mode="both"
    )
    return source, prune(options)


def _damaged(folder: Path, bundle: Bundle, damage: Callable[[dict[str, ir.Model]], None]) -> Bundle:
    """The bundle with its graphs changed, and a ledger that fits them."""
    models = load_graphs(bundle)
    damage(models)
    with draft_bundle(folder / "damaged", force=False) as draft:
        return draft.commit(rewrite_bundle(bundle, models, draft.path))


def _pruned(pair: tuple[Bundle, Bundle], **changes: Any) -> Pruned:
    kept = np.load(pair[1].path / "checkpoint_ids.npy").astype(np.int64)
    heads = tuple(CutTensor("head.lm", name, name) for name in ("w", "b"))
    tables = (CutTensor("backbone", "embed", "embed"),)
    return Pruned(**({"token_ids": kept, "columns": kept, "renumbered": True, "heads": heads,
                      "tables": tables} | changes))  # fmt: skip


def _change(graph: str, name: str, change: Callable[[np.ndarray], Any]) -> Any:
    def damage(models: dict[str, ir.Model]) -> None:
        value = models[graph].graph.initializers[name]
        assert value.const_value is not None
        array = value.const_value.numpy().copy()
        change(array)
        value.const_value = ir.tensor(array, name=name)

    return damage


def _swap(array: np.ndarray) -> None:
    array[[3, 9]] = array[[9, 3]]


def _nudge(array: np.ndarray) -> None:
    array.reshape(-1)[5] = np.nextafter(array.reshape(-1)[5], np.float32(np.inf))


def _halve(models: dict[str, ir.Model]) -> None:
    for node in models["head.lm"].graph:
        if node.op_type == "Constant":
            node.attributes["value_float"] = ir.AttrFloat32("value_float", 0.25)


def test_the_undamaged_pair_passes(pair: tuple[Bundle, Bundle]) -> None:
    found = check_pruned(*pair, _pruned(pair))
    assert found and found.tensors == 3 and found.logits_bit_equal and found.hidden_states_bit_equal


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_change("head.lm", "w", _swap), "w: row 3 is not row"),
        (_change("head.lm", "w", _nudge), "w: row 0 is not row"),
        (_change("head.lm", "b", _nudge), "b: row 5 is not row"),
        (_change("backbone", "embed", _swap), "embed: row 3 is not row"),
        (_halve, "head lm does not answer for the kept tokens as before"),
    ],
    ids=["rows swapped", "one weight", "one bias", "embedding", "scale"],
)
def test_damage_is_found(
    pair: tuple[Bundle, Bundle], tmp_path: Path, damage: Any, message: str
) -> None:
    with pytest.raises(ParityError, match=message):
        check_pruned(pair[0], _damaged(tmp_path, pair[1], damage), _pruned(pair))


def test_damage_that_the_ledger_does_not_show_is_found_by_running(
    pair: tuple[Bundle, Bundle], tmp_path: Path
) -> None:
    unseen = _pruned(pair, tables=(), heads=(CutTensor("head.lm", "w", "w"),))
    swapped = _damaged(tmp_path, pair[1], _change("backbone", "embed", lambda a: a.fill(0.5)))
    with pytest.raises(ParityError, match="does not answer for the kept tokens"):
        check_pruned(pair[0], swapped, unseen)


class Rewritten:
    """A tokenizer and the document of its rewritten form, to be damaged."""

    def __init__(self, folder: Path) -> None:
        bundle = tokenizer_bundle(folder, byte_level())
        self.folder = folder
        self.table: TokenTable = read_tokens(bundle)
        closure = always_kept(bundle, self.table)
        heart = frozenset({self.table.vocabulary["Ġheart"], self.table.vocabulary["Ġpatient"]})
        self.kept = select(closure, range(closure.size), Wanted(None, heart), Limits()).kept
        self.document = json.loads(rewrite_tokenizer(self.table, self.kept))

    def check(self) -> Any:
        (self.folder / "tokenizer.json").write_text(json.dumps(self.document), encoding="utf-8")
        return check_rewritten(self.table, self.folder, self.kept)


def test_a_right_tokenizer_passes(tmp_path: Path) -> None:
    found = Rewritten(tmp_path).check()
    assert found.texts > 400 and found.same > 100 and found.longer > 50


def test_a_lost_merge_is_found(tmp_path: Path) -> None:
    made = Rewritten(tmp_path)
    made.document["model"]["merges"].pop()
    with pytest.raises(ParityError, match="of which every token is kept, is split into"):
        made.check()


def test_wrong_numbers_are_found(tmp_path: Path) -> None:
    made = Rewritten(tmp_path)
    vocabulary = made.document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    with pytest.raises(ParityError, match="numbers 2 tokens otherwise than the rows"):
        made.check()


def test_another_reading_is_found(tmp_path: Path) -> None:
    made = Rewritten(tmp_path)
    made.document["decoder"] = None
    with pytest.raises(ParityError, match="reads back as"):
        made.check()


def test_an_added_token_that_is_no_longer_special_is_found(tmp_path: Path) -> None:
    made = Rewritten(tmp_path)
    made.document["added_tokens"][-1]["content"] = "<other>"
    with pytest.raises(ParityError, match="tokens otherwise than the rows"):
        made.check()
