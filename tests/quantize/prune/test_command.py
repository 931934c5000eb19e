"""`headport prune`: bundles cut in both modes, what they answer, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from headport.bundle import Bundle
from headport.cli import main
from headport.errors import OutputError, ParityError, QuantizeError, UsageError
from headport.ledger import head_weight, read_tensor
from headport.quantize import Options as QuantizeOptions
from headport.quantize import quantize
from headport.quantize.prune import Options, prune
from headport.recipe import read_recipe
from headport.runner import open_runner
from headport.runtime import Generator
from headport.selftest import run_selftest
from tests.quantize.prune.tokenizers_of import KINDS, LINES, byte_level
from tests.quantize.prune.toys import H, count_texts, write_bundle

STATES = np.random.default_rng(3).normal(size=(9, H)).astype(np.float32)


def _pruned(tmp_path: Path, source: Bundle, name: str = "pruned", **options: Any) -> Bundle:
    counts = options.pop("counts", None) or count_texts(tmp_path / "counts.parquet", source)
    asked = {"least": 1, **options}
    return prune(Options(bundle=source.path, output=tmp_path / name, counts=counts, **asked))


def _columns(bundle: Bundle, before: Bundle) -> np.ndarray:
    """Column of the head before, for each column of the head after."""
    vocabulary = bundle.manifest.vocabulary
    file = vocabulary.map or vocabulary.checkpoint_ids
    assert file is not None
    ids = np.load(bundle.path / file)
    assert ids.dtype == np.int32 and (np.diff(ids) > 0).all()
    return ids


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
    bundle = _pruned(tmp_path, source, mode=mode)
    kept = _columns(bundle, source)
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
    bundle = _pruned(tmp_path, source, mode=mode)
    full, small = Generator(source.path), Generator(bundle.path)
    prompt = "The patient's heart"
    ids = full.generate(prompt, max_new_tokens=1)[0].prompt_token_ids
    own = small.generate(prompt, max_new_tokens=1)[0].prompt_token_ids
    kept = _columns(bundle, source)
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
    output = _pruned(tmp_path, source, "output")
    both = _pruned(tmp_path, source, "both", mode="both")
    K = output.manifest.vocabulary.kept_size
    assert K == both.manifest.vocabulary.size < source.manifest.vocabulary.size
    assert (_columns(output, source) == _columns(both, source)).all()
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
    bundle = _pruned(tmp_path, source, mode=mode)
    kept = _columns(bundle, source)
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
    bundle = _pruned(tmp_path, certified, drop=tmp_path / "drop.txt")
    kept = _columns(bundle, source)
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
    large = _pruned(tmp_path, source, "large", mode=first, counts=counts)
    twice = _pruned(tmp_path, large, "twice", mode=second, counts=counts, min_count=3)
    once = _pruned(tmp_path, source, "once", mode="both", counts=counts, min_count=3)
    logits = [open_runner(b).full_logits(STATES) for b in (twice, once)]
    assert (logits[0] == logits[1]).all()
    ids = _columns(once, source)
    assert (twice.path / "vocab_map.npy").exists() == (second == "output")
    if second == "both":
        assert (_columns(twice, source) == ids).all()
        for name in ("tokenizer.json", "config.json"):
            assert (twice.path / name).read_bytes() == (once.path / name).read_bytes()
        assert [t.sha256 for t in twice.manifest.tensors] == [
            t.sha256 for t in once.manifest.tensors
        ]
    elif first == "output":
        assert (_columns(twice, source) == ids).all()
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
    bundle = _pruned(tmp_path, source, mode="both")
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


def test_the_report_says_why_each_token_stays(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "toy", byte_level())
    bundle = _pruned(tmp_path, source)
    stage = bundle.manifest.provenance.stages[-1]
    report = stage.report
    assert (
        sum(report["by_reason"].values()) == report["kept"] == bundle.manifest.vocabulary.kept_size
    )
    assert report["by_reason"]["bytes"] == 256 and report["by_reason"]["special tokens"] == 3
    assert report["covered"] == 1.0 and report["before"] == source.manifest.vocabulary.size
    assert report["head_bytes_after"] == report["kept"] * H * 4
    assert stage.stage == "prune" and stage.options["counts"] == "counts.parquet"


@pytest.mark.parametrize("mode", ["output", "both"])
def test_the_command_line(tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_bundle(tmp_path / "toy", byte_level())
    counts = count_texts(tmp_path / "counts.parquet", source)
    arguments = ["prune", str(source.path), "-o", str(tmp_path / "small"), "--mode", mode]
    arguments += ["--counts", str(counts), "--least", "1"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "tokens kept" in printed and "bit by bit" in printed and "256 bytes" in printed
    assert main(arguments) == 2
    assert "exists" in capsys.readouterr().err


def test_a_recipe_prunes_between_export_and_quantising(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "toy", byte_level())
    counts = count_texts(tmp_path / "counts.parquet", source)
    file = tmp_path / "recipe.toml"
    file.write_text(f"[quantize]\nhead='int8'\n[prune]\ncounts='{counts}'\nleast=1\nmode='both'\n")
    recipe = read_recipe(file)
    names = [stage.name for stage in recipe.stages]
    assert names == ["export", "prune", "quantize"]
    stage = recipe.stages[1]
    options = stage.options(recipe.sections["prune"], source.path, tmp_path / "out", str(file))
    assert stage.run(options).manifest.vocabulary.checkpoint_ids is not None
    file.write_text("[prune]\nmax_size = 0\nmin_count = 0\n")
    with pytest.raises(UsageError, match="--max-size 0"):
        read_recipe(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_count": -1}, "--min-count -1: 0 or more expected"),
        ({"coverage": 0.0}, "--coverage 0.0: above 0"),
        ({"coverage": 1.5}, "--coverage 1.5: above 0 and at most 1"),
        ({"max_size": 0}, "--max-size 0: 1 or more"),
        ({"counts": None}, "nothing says which tokens to keep"),
        ({"counts": None, "min_count": 0, "coverage": 0.5}, "--coverage is a share of a corpus"),
        ({"corpus": ("x.txt",)}, "--counts and --corpus both say"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    asked = {"counts": tmp_path / "counts.parquet"} | options
    with pytest.raises(UsageError, match=message):
        prune(Options(bundle=tmp_path / "in", output=tmp_path / "out", **asked))


def test_a_corpus_is_counted_on_the_way(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "toy", byte_level())
    (tmp_path / "corpus.txt").write_text("\n\n".join(LINES[:2]))
    options = {"least": 1, "corpus": (str(tmp_path / "corpus.txt"),)}
    bundle = prune(Options(bundle=source.path, output=tmp_path / "out", **options))
    counted = _pruned(tmp_path, source)
    new = set(_columns(bundle, source)) ^ set(_columns(counted, source))
    assert len(new) <= 1  # the blank lines between the texts
    assert bundle.manifest.provenance.stages[-1].options["corpus"] == ["corpus.txt"]


def test_a_corpus_in_another_language_is_refused(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "toy", byte_level())
    counts = count_texts(tmp_path / "other.parquet", source, ("ქართული ენა", "日本"))
    with pytest.raises(UsageError, match="in a language or format that this tokenizer has few"):
        prune(Options(bundle=source.path, output=tmp_path / "out", counts=counts))
    assert not (tmp_path / "out").exists()


def test_counts_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "toy", byte_level())
    other = write_bundle(tmp_path / "other", byte_level(400))
    counts = count_texts(tmp_path / "counts.parquet", other)
    with pytest.raises(UsageError, match=r"own tokenizer were expected .* those of another one"):
        _pruned(tmp_path, source, counts=counts)


def test_unknown_tokens_are_all_named(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "toy", byte_level())
    (tmp_path / "keep.txt").write_text("Ġnever\nid:99999\nĠnor this\n")
    with pytest.raises(UsageError, match=r"'Ġnever'.*99999 found.*'Ġnor this'"):
        _pruned(tmp_path, source, keep=tmp_path / "keep.txt")


def test_an_id_that_no_token_has_is_kept_where_ids_stay(tmp_path: Path) -> None:
    """A configuration may end a reply with a row that the tokenizer does not name."""
    document = json.loads(byte_level().to_str())
    vocabulary = document["model"]["vocab"]
    hole = vocabulary.pop("Ġheart")
    document["model"]["merges"] = [
        pair for pair in document["model"]["merges"] if "Ġheart" not in (pair[0] + pair[1], *pair)
    ]
    # Added tokens behind a vocabulary with a gap would be numbered into it.
    document |= {"added_tokens": document["added_tokens"][:1], "post_processor": None}
    words = Tokenizer.from_str(json.dumps(document))
    assert words.id_to_token(hole) is None
    generation = {"eos_token_id": [words.token_to_id("<|pad|>"), hole]}
    source = write_bundle(tmp_path / "toy", words, generation=generation, chat=None)
    output, both = (_pruned(tmp_path, source, mode, mode=mode) for mode in ("output", "both"))
    assert hole in _columns(output, source) and hole not in _columns(both, source)
    new = Tokenizer.from_file(str(both.path / "tokenizer.json")).token_to_id("<|pad|>")
    assert both.manifest.defaults["eos_token_id"] == [new]
    notes = both.manifest.provenance.stages[-1].report["notes"]
    assert any(f"eos_token_id: {hole}" in note for note in notes)
    (tmp_path / "keep.txt").write_text(f"id:{hole}\n")
    with pytest.raises(UsageError, match="--mode both has no token for them"):
        _pruned(tmp_path, source, "third", mode="both", keep=tmp_path / "keep.txt")


def test_what_was_cut_before_cannot_come_back(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "toy", byte_level())
    first = _pruned(tmp_path, source)
    gone = set(range(source.manifest.vocabulary.size)) - set(_columns(first, source).tolist())
    (tmp_path / "keep.txt").write_text(f"id:{min(gone)}\n")
    with pytest.raises(UsageError, match="1 of these ids were cut before"):
        _pruned(tmp_path, first, "second", keep=tmp_path / "keep.txt")


def test_a_tokenizer_of_whole_words_is_left_as_it_is(tmp_path: Path) -> None:
    from tokenizers import models

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    source = write_bundle(tmp_path / "toy", words, chat=None)
    (tmp_path / "keep.txt").write_text("a\n")
    asked = Options(bundle=source.path, output=tmp_path / "out", keep=tmp_path / "keep.txt")
    with pytest.raises(QuantizeError, match="WordLevel found; use --mode output"):
        prune(Options(**{**_as_dict(asked), "mode": "both"}))
    bundle = prune(asked)
    assert np.load(bundle.path / "vocab_map.npy").tolist() == [0, 2]


def _as_dict(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__struct_fields__}


def test_what_cannot_be_pruned_is_refused(tmp_path: Path) -> None:
    from headport.lowering import Options as LowerOptions
    from headport.lowering import lower

    source = write_bundle(tmp_path / "toy", byte_level())
    lowered = lower(LowerOptions(bundle=source.path, output=tmp_path / "cpu", target="ort-cpu"))
    with pytest.raises(QuantizeError, match="lowered to ort-cpu; prune the portable bundle"):
        _pruned(tmp_path, lowered)
    many = quantize(
        QuantizeOptions(
            bundle=source.path, output=tmp_path / "many", head="int8", block=16, rescore=410
        )
    )
    with pytest.raises(QuantizeError, match=r"410 candidates .* prune first, then quantise"):
        _pruned(tmp_path, many)
    with pytest.raises(OutputError, match="contains or lies in the input"):
        prune(Options(bundle=source.path, output=source.path / "x", min_count=0))


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
        _pruned(tmp_path, source)
    assert not (tmp_path / "pruned").exists()
