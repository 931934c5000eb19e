"""Bundles cut in both modes, and what they answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from headport.bundle import Bundle
from headport.errors import ParityError
from headport.ledger import head_weight, read_tensor
from headport.quantize import Options as QuantizeOptions
from headport.quantize import quantize
from headport.quantize.prune import Options, prune
from headport.quantize.prune.check import CutTensor, Pruned, check_pruned
from headport.runner import open_runner
from headport.runtime import Generator
from headport.selftest import run_selftest
from tests.quantize.prune.tokenizers_of import KINDS, byte_level
from tests.quantize.prune.toys import H, count_texts, kept_ids, prune_toy, write_bundle

STATES = np.random.default_rng(3).normal(size=(9, H)).astype(np.float32)


@pytest.mark.parametrize("mode", ["output", "both"])
@pytest.mark.parametrize(
    "toy",
    [
        {},
        {"tied": True, "padding": 11},
        {"bias": True, "scale": 0.5, "softcap": 3.0},
        {"tied": True, "dtype": "float16"},
    ],
    ids=["plain", "tied, padded", "bias, scale, softcap", "half"],
)
def test_kept_tokens_get_the_same_logits(tmp_path: Path, mode: str, toy: dict[str, Any]) -> None:
    source = write_bundle(tmp_path / "toy", byte_level(), **toy)
    bundle = prune_toy(tmp_path, source, mode=mode)
    kept = kept_ids(bundle)
    K = len(kept)
    assert 256 < K < source.manifest.vocabulary.size
    before, after = open_runner(source).full_logits(STATES), open_runner(bundle).full_logits(STATES)
    assert after.shape == (9, K) and (after == before[:, kept]).all()
    head = bundle.manifest.heads["lm"]
    assert head.vocab_size == K
    assert head.tied == (mode == "both" and bool(toy.get("tied")))
    rows = [
        read_tensor(b, head_weight(b.manifest, b.manifest.heads["lm"])[0]) for b in (source, bundle)
    ]
    assert (rows[0][kept] == rows[1]).all()
    assert bundle.manifest.vocabulary.padded_size == (K if mode == "both" else len(rows[0]))
    check = bundle.manifest.provenance.stages[-1].report["check"]
    assert check["logits_bit_equal"] and check["hidden_states_bit_equal"]
    assert check["tensors"] >= (2 if mode == "both" else 1)
    assert run_selftest(Bundle.open(bundle.path)) and not bundle.unlisted_files()


@pytest.mark.parametrize("mode", ["output", "both"])
def test_the_runtime_answers_alike(tmp_path: Path, mode: str) -> None:
    source = write_bundle(tmp_path / "toy", byte_level())
    bundle = prune_toy(tmp_path, source, mode=mode)
    full, small = Generator(source.path), Generator(bundle.path)
    prompt = "The patient's heart"
    ids = full.generate(prompt, max_new_tokens=1)[0].prompt_token_ids
    own = small.generate(prompt, max_new_tokens=1)[0].prompt_token_ids
    kept = kept_ids(bundle)
    assert own == (ids if mode == "output" else np.searchsorted(kept, ids).tolist())
    expected = full.logits(ids)
    found = small.logits(own)
    if mode == "output":
        assert (found[:, kept] == expected[:, kept]).all()
        assert np.isneginf(np.delete(found, kept, axis=1)).all()
    else:
        assert (found == expected[:, kept]).all()
    # The best kept token is what a pruned head must choose.
    best = kept[expected[-1, kept].argmax()]
    [reply] = small.generate([own], max_new_tokens=1)
    assert reply.token_ids == [int(best) if mode == "output" else int(np.searchsorted(kept, best))]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_in_both_modes(tmp_path: Path, kind: str) -> None:
    source = write_bundle(tmp_path / "toy", KINDS[kind](), chat=None)
    output = prune_toy(tmp_path, source, "output")
    both = prune_toy(tmp_path, source, "both", mode="both")
    K = output.manifest.vocabulary.kept_size
    assert K == both.manifest.vocabulary.size < source.manifest.vocabulary.size
    assert (kept_ids(output) == kept_ids(both)).all()
    assert Tokenizer.from_file(str(both.path / "tokenizer.json")).get_vocab_size() == K
    assert (output.path / "tokenizer.json").read_bytes() == (
        source.path / "tokenizer.json"
    ).read_bytes()


RECIPES: tuple[dict[str, Any], ...] = (
    {"head": "int8", "block": 16},
    {"head": "int8-row"},
    {"head": "int4", "block": 16},
    {"head": "int4", "block": 16, "asymmetric": True},
    {"head": "fp16"},
    {"head": "bf16"},
    {"head": "fp8"},
    {"head": "int8", "block": 16, "rescore": 10},
    {"head": "int8", "block": 16, "rescore": 10, "certify": True, "bound": "block"},
    {"head": "int8", "block": 16, "rescore": 10, "certify": True, "activations": "rounded"},
    {"head": "int8", "block": 16, "embedding": "int8", "embedding_block": 16},
    {"head": "int8", "block": 16, "rescore": 10, "certify": True, "embedding": "fp16"},
)


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [(r, "output") for r in RECIPES] + [(r, "both") for r in RECIPES[2::3]],
    ids=lambda each: each if isinstance(each, str) else "-".join(map(str, each.values())),
)
def test_quantised_heads_are_cut_bit_by_bit(
    tmp_path: Path, recipe: dict[str, Any], mode: str
) -> None:
    toy = write_bundle(tmp_path / "toy", byte_level(), tied=True, bias=True, width=23)
    source = quantize(QuantizeOptions(bundle=toy.path, output=tmp_path / "quantised", **recipe))
    bundle = prune_toy(tmp_path, source, mode=mode)
    kept = kept_ids(bundle)
    states = STATES[:, :23]
    before, after = open_runner(source), open_runner(bundle)
    assert (after.full_logits(states) == before.full_logits(states)[:, kept]).all()
    graph = source.manifest.heads["lm"].graph
    parts = [_tensors(which, graph) for which in (source, bundle)]
    assert parts[0].keys() == parts[1].keys() and len(parts[0]) >= 2
    for name, new in parts[1].items():
        assert (parts[0][name][kept] == new).all() and parts[0][name].dtype == new.dtype
    if "rescore" in recipe:
        found = after.head(states).candidates
        assert found is not None
        full = before.full_logits(states).astype(np.float64)[:, kept]
        assert (found.ids[:, 0] == full.argmax(axis=1)).all()
        quantised = after.quantised(states)
        assert (quantised.logits == before.quantised(states).logits[:, kept]).all()
        if recipe.get("certify"):
            assert Generator(bundle.path).exact


def _tensors(bundle: Bundle, graph: str) -> dict[str, np.ndarray]:
    """What a graph reads from the ledger; a cut tensor that was shared has another name."""
    return {
        consumer.removeprefix(f"{graph}:").replace(".kept", ""): read_tensor(bundle, tensor)
        for tensor in bundle.manifest.tensors
        for consumer in tensor.consumers
        if consumer.startswith(f"{graph}:")
    }


def test_equal_rows_are_found_again_by_their_new_numbers(tmp_path: Path) -> None:
    """Of three equal rows the lowest is removed: the next takes its place."""
    tokenizer = byte_level()
    toy = write_bundle(tmp_path / "toy", tokenizer)
    source = _with_equal_rows(tmp_path, toy)
    names = ["Ġheart", "Ġpatient", "Ġarter"]
    ids = [tokenizer.token_to_id(n) for n in names]
    certified = quantize(
        QuantizeOptions(
            bundle=source.path,
            output=tmp_path / "int8",
            head="int8",
            block=16,
            rescore=8,
            certify=True,
        )
    )
    (tmp_path / "drop.txt").write_text(f"id:{min(ids)}\n")
    bundle = prune_toy(tmp_path, certified, drop=tmp_path / "drop.txt")
    kept = kept_ids(bundle)
    assert min(ids) not in kept and set(ids) - {min(ids)} <= set(kept)
    rest = sorted(np.searchsorted(kept, sorted(ids)[1:]).tolist())
    weight = read_tensor(source, head_weight(source.manifest, source.manifest.heads["lm"])[0])
    found = open_runner(bundle).head(100 * weight[ids[1]][None]).candidates
    assert found is not None and found.ids[0, :2].tolist() == rest
    assert found.certified_k[0] >= 2  # equal rows: their order is proved


def _with_equal_rows(tmp_path: Path, toy: Bundle) -> Bundle:
    import onnx_ir as ir

    from headport.bundle import draft_bundle
    from headport.graphs import load_graphs, rewrite_bundle
    from headport.selftest import write_selftest

    models = load_graphs(toy)
    value = models["head.lm"].graph.initializers["w"]
    rows = value.const_value.numpy().copy()
    tokenizer = Tokenizer.from_file(str(toy.path / "tokenizer.json"))
    ids = [tokenizer.token_to_id(n) for n in ("Ġheart", "Ġpatient", "Ġarter")]
    rows[ids] = rows[ids[0]]
    value.const_value = ir.tensor(rows, name="w")
    with draft_bundle(tmp_path / "equal", force=False) as draft:
        preview = draft.preview(rewrite_bundle(toy, models, draft.path))
        return draft.commit(write_selftest(preview))


def test_everything_kept_changes_nothing(tmp_path: Path) -> None:
    for padding, modes in ((0, ("output", "both")), (5, ("output",))):
        source = write_bundle(tmp_path / f"toy{padding}", byte_level(), tied=True, padding=padding)
        for mode in modes:
            bundle = prune(
                Options(
                    bundle=source.path,
                    output=tmp_path / f"{mode}{padding}",
                    mode=mode,
                    min_count=0,
                )
            )
            assert bundle.manifest.tensors == source.manifest.tensors
            assert bundle.manifest.vocabulary == source.manifest.vocabulary
            assert bundle.manifest.heads == source.manifest.heads
            for name in ("data/shared.bin", "tokenizer.json", "config.json", "head.lm.onnx"):
                assert (bundle.path / name).read_bytes() == (source.path / name).read_bytes()


def test_padding_is_dropped_where_ids_are_given_anew(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "toy", byte_level(), tied=True, padding=5)
    options = Options(bundle=source.path, output=tmp_path / "both", mode="both", min_count=0)
    bundle = prune(options)
    size = source.manifest.vocabulary.size
    assert bundle.manifest.vocabulary.padded_size == bundle.manifest.vocabulary.size == size
    assert json.loads((bundle.path / "config.json").read_text())["vocab_size"] == size
    assert bundle.manifest.heads["lm"].tied


@pytest.mark.parametrize("first", ["output", "both"])
@pytest.mark.parametrize("second", ["output", "both"])
def test_pruning_twice_is_pruning_once(tmp_path: Path, first: str, second: str) -> None:
    source = write_bundle(tmp_path / "toy", byte_level(), tied=True, padding=3)
    counts = count_texts(tmp_path / "counts.parquet", source)
    large = prune_toy(tmp_path, source, "large", mode=first, counts=counts)
    twice = prune_toy(tmp_path, large, "twice", mode=second, counts=counts, min_count=3)
    once = prune_toy(tmp_path, source, "once", mode="both", counts=counts, min_count=3)
    logits = [open_runner(b).full_logits(STATES) for b in (twice, once)]
    assert (logits[0] == logits[1]).all()
    ids = kept_ids(once)
    assert (twice.path / "vocab_map.npy").exists() == (second == "output")
    if second == "both":
        assert (kept_ids(twice) == ids).all()
        for name in ("tokenizer.json", "config.json"):
            assert (twice.path / name).read_bytes() == (once.path / name).read_bytes()
        assert [t.sha256 for t in twice.manifest.tensors] == [
            t.sha256 for t in once.manifest.tensors
        ]
    elif first == "output":
        assert (kept_ids(twice) == ids).all()
    else:  # its map leads to the ids of the bundle in between
        between = np.load(large.path / "checkpoint_ids.npy")
        assert (between[np.load(twice.path / "vocab_map.npy")] == ids).all()


def test_configurations_get_the_new_ids(tmp_path: Path) -> None:
    tokenizer = byte_level()
    pad, start, stop = (tokenizer.token_to_id(t) for t in ("<|pad|>", "<|start|>", "<|stop|>"))
    heart = tokenizer.token_to_id("Ġheart")
    size = tokenizer.get_vocab_size()
    source = write_bundle(
        tmp_path / "toy",
        tokenizer,
        generation={
            "eos_token_id": [stop, start],
            "pad_token_id": pad,
            "bad_words_ids": [[heart], [size + 7]],
        },
        config={"eos_token_id": stop, "hidden_size": 24},
    )
    bundle = prune_toy(tmp_path, source, mode="both")
    after = Tokenizer.from_file(str(bundle.path / "tokenizer.json"))
    new = {t: after.token_to_id(t) for t in ("<|pad|>", "<|start|>", "<|stop|>", "Ġheart")}
    generation = json.loads((bundle.path / "generation_config.json").read_text())
    expected = {
        "eos_token_id": [new["<|stop|>"], new["<|start|>"]],
        "pad_token_id": new["<|pad|>"],
        "bad_words_ids": [[new["Ġheart"]]],
    }
    assert generation == expected == bundle.manifest.defaults
    config = json.loads((bundle.path / "config.json").read_text())
    K = bundle.manifest.vocabulary.size
    assert config == {"vocab_size": K, "eos_token_id": new["<|stop|>"], "hidden_size": 24}
    notes = bundle.manifest.provenance.stages[-1].report["notes"]
    assert any(f"bad_words_ids: [{size + 7}]" in note for note in notes)


def test_a_row_that_is_not_the_one_it_should_be_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headport.quantize.prune import rows

    source = write_bundle(tmp_path / "toy", byte_level())
    cut = rows._cut

    def swap(value: Any, kept: np.ndarray, width: int, what: str) -> None:
        changed = kept.copy()
        changed[[3, 4]] = changed[[4, 3]]
        cut(value, changed, width, what)

    monkeypatch.setattr(rows, "_cut", swap)
    with pytest.raises(ParityError, match="row 3 is not row 3"):
        prune_toy(tmp_path, source)
    assert not (tmp_path / "pruned").exists()


@pytest.mark.parametrize("size", [100, 300])
def test_a_bias_too_short_for_the_ledger_is_compared_row_by_row(tmp_path: Path, size: int) -> None:
    """Of 300 numbers it lies in the ledger before the cut and in the graph after it."""
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(size)}, unk_token="w0"))
    source = write_bundle(tmp_path / "toy", words, chat=None, bias=True)
    (tmp_path / "keep.txt").write_text("w3\nw40\nw99\n")
    bundle = prune(Options(bundle=source.path, output=tmp_path / "out", keep=tmp_path / "keep.txt"))
    assert kept_ids(bundle).tolist() == [0, 3, 40, 99]
    assert bundle.manifest.provenance.stages[-1].report["check"]["tensors"] == 2
    wrong = Pruned(
        token_ids=np.array([0, 3, 40, 99]),
        columns=np.array([0, 3, 40, 98]),
        renumbered=False,
        heads=(CutTensor("head.lm", "b", "b"),),
        tables=(),
    )
    with pytest.raises(ParityError, match="row 3 is not row 98 of b"):
        check_pruned(source, bundle, wrong)
