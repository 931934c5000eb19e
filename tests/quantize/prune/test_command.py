"""`headport prune`: its options, its report, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from headport.cli import main
from headport.errors import OutputError, QuantizeError, UsageError
from headport.quantize import Options as QuantizeOptions
from headport.quantize import quantize
from headport.quantize.prune import Options, prune
from headport.recipe import read_recipe
from tests.quantize.prune.tokenizers_of import LINES, byte_level
from tests.quantize.prune.toys import H, count_texts, kept_ids, prune_toy, write_bundle


def test_the_report_says_why_each_token_stays(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "toy", byte_level())
    bundle = prune_toy(tmp_path, source)
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
        ({"field": "body"}, "--field says where a corpus holds its text: give --corpus"),
        ({"union_size": 9}, "--union-size .* give --union with it"),
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
    counted = prune_toy(tmp_path, source)
    new = set(kept_ids(bundle)) ^ set(kept_ids(counted))
    assert len(new) <= 1  # the blank lines between the texts
    asked = bundle.manifest.provenance.stages[-1].options
    assert (asked["corpus"], asked["field"]) == (["corpus.txt"], "text")


def test_the_field_of_a_corpus_is_read_and_kept_in_the_record(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "toy", byte_level())
    lines = [json.dumps({"body": line, "text": "0"}) for line in LINES[:2]]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    options = {"least": 1, "corpus": (str(tmp_path / "corpus.jsonl"),), "field": "body"}
    bundle = prune(Options(bundle=source.path, output=tmp_path / "out", **options))
    assert (kept_ids(bundle) == kept_ids(prune_toy(tmp_path, source))).all()
    assert bundle.manifest.provenance.stages[-1].options["field"] == "body"


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
        prune_toy(tmp_path, source, counts=counts)


def test_unknown_tokens_are_all_named(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "toy", byte_level())
    (tmp_path / "keep.txt").write_text("Ġnever\nid:99999\nĠnor this\n")
    with pytest.raises(UsageError, match=r"'Ġnever'.*99999 found.*'Ġnor this'"):
        prune_toy(tmp_path, source, keep=tmp_path / "keep.txt")


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
    output, both = (prune_toy(tmp_path, source, mode, mode=mode) for mode in ("output", "both"))
    assert hole in kept_ids(output) and hole not in kept_ids(both)
    new = Tokenizer.from_file(str(both.path / "tokenizer.json")).token_to_id("<|pad|>")
    assert both.manifest.defaults["eos_token_id"] == [new]
    notes = both.manifest.provenance.stages[-1].report["notes"]
    assert any(f"eos_token_id: {hole}" in note for note in notes)
    (tmp_path / "keep.txt").write_text(f"id:{hole}\n")
    with pytest.raises(UsageError, match="--mode both has no token for them"):
        prune_toy(tmp_path, source, "third", mode="both", keep=tmp_path / "keep.txt")


def test_what_was_cut_before_cannot_come_back(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "toy", byte_level())
    first = prune_toy(tmp_path, source)
    gone = set(range(source.manifest.vocabulary.size)) - set(kept_ids(first).tolist())
    (tmp_path / "keep.txt").write_text(f"id:{min(gone)}\n")
    with pytest.raises(UsageError, match="1 of these ids were cut before"):
        prune_toy(tmp_path, first, "second", keep=tmp_path / "keep.txt")


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
        prune_toy(tmp_path, lowered)
    many = quantize(
        QuantizeOptions(
            bundle=source.path, output=tmp_path / "many", head="int8", block=16, rescore=410
        )
    )
    with pytest.raises(QuantizeError, match=r"410 candidates .* prune first, then quantise"):
        prune_toy(tmp_path, many)
    with pytest.raises(OutputError, match="contains or lies in the input"):
        prune(Options(bundle=source.path, output=source.path / "x", min_count=0))
