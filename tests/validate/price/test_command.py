from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.errors import CheckpointError, OutputError, ParityError, UsageError
from headport.quantize.prune.tokens import read_tokens
from headport.runner import open_runner
from headport.validate.price.command import Options, price_with
from headport.validate.price.report import PriceReport, Slice
from tests.validate.conftest import PROSE

MODES = ("output", "both")


@pytest.fixture(scope="module")
def both(pruned) -> dict[str, Path]:
    return {mode: pruned(mode) for mode in MODES}


@pytest.fixture(scope="module")
def reports(both, bundle, checkpoint, counts, texts, reference_of) -> dict[str, PriceReport]:
    return {
        mode: price_with(
            reference_of(checkpoint),
            Options(
                bundle=bundle,
                pruned=path,
                reference=str(checkpoint),
                text=texts,
                counts=counts,
                max_lost_mass=0.2,
            ),
        )
        for mode, path in both.items()
    }


def kept_ids(path: Path) -> np.ndarray:
    vocabulary = Bundle.open(path).manifest.vocabulary
    return np.load(path / (vocabulary.map or vocabulary.checkpoint_ids)).astype(np.int64)


def of(report: PriceReport, name: str) -> Slice:
    return next(s for s in report.slices if s.name == name)


def distributions(checkpoint: Path, bundle: Path, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of a text and what PyTorch expects after each, computed here in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = read_tokens(Bundle.open(bundle)).encode(text)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().numpy()
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.array(ids), p / p.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def short_text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("short") / "short.txt"
    file.write_text("The numbers say add(a: int), 中文 and a head of one matrix.")
    return file


@pytest.mark.parametrize("mode", MODES)
def test_figures_are_those_of_the_definitions(
    mode, both, bundle, checkpoint, short_text, reference_of
):
    path = both[mode]
    options = Options(bundle=bundle, pruned=path, reference=str(checkpoint), text=(short_text,))
    report = price_with(reference_of(checkpoint), options)
    text = short_text.read_text()
    ids, p = distributions(checkpoint, bundle, text)
    kept = kept_ids(path)
    is_kept = np.zeros(p.shape[1], bool)
    is_kept[kept] = True
    assert 0 < is_kept[ids].mean() < 1  # the text holds both
    whole = of(report, "all")
    assert whole.tokens == len(ids) - 1
    assert whole.covered_tokens == pytest.approx(is_kept[ids[1:]].mean())
    table = read_tokens(Bundle.open(bundle))
    sizes = [len(table.pieces[i]) for i in ids[1:]]  # byte level: a character per byte
    assert whole.bytes == sum(sizes)
    # All bytes of a character belong to the first token that holds some of them.
    share = np.dot(is_kept[ids[1:]], sizes) / sum(sizes)
    assert whole.covered_bytes == pytest.approx(share, abs=3 / sum(sizes))
    assert whole.lost_mass == pytest.approx(p[:-1][:, ~is_kept].sum(axis=1).mean(), rel=1e-4)
    bits = -np.log2(p[np.arange(len(ids) - 1), ids[1:]]).sum() / sum(sizes)
    [spelling, _] = report.spelling
    assert spelling.bits_per_byte_reference == pytest.approx(bits, rel=1e-5)
    assert spelling.bits_per_byte_before == pytest.approx(bits, rel=1e-4)
    # The head's rows are the original ones, so what is left agrees with the renormalised rest.
    assert whole.kl is not None and 0 <= whole.kl < 1e-9
    expected = whole.tokens if mode == "output" else int(np.argmin(is_kept[ids]))
    assert whole.kl_tokens == expected
    worst = report.worst[0]
    lost = p[:-1][:, ~is_kept].sum(axis=1)
    assert worst.lost_mass == pytest.approx(lost.max(), rel=1e-4)
    at = int(lost.argmax()) + 1
    assert worst.token == table.pieces[int(ids[at])] and worst.kept == is_kept[ids[at]]
    mass = np.where(is_kept, 0, p[:-1].sum(axis=0))
    assert report.removed[0].id == mass.argmax()
    assert report.removed[0].mass == pytest.approx(mass.max() / whole.tokens, rel=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_bits_after_are_those_of_the_kept_spelling(
    mode, both, bundle, checkpoint, short_text, reference_of
):
    path = both[mode]
    report = price_with(
        reference_of(checkpoint),
        Options(bundle=bundle, pruned=path, reference=str(checkpoint), text=(short_text,)),
    )
    text, kept = short_text.read_text(), kept_ids(path)
    if mode == "both":
        own = np.array(read_tokens(Bundle.open(path)).encode(text))
        fed, columns = own, own
    else:  # what the other mode's tokenizer does, in original ids
        own = np.array(read_tokens(Bundle.open(both["both"])).encode(text))
        fed = kept_ids(both["both"])[own]
        columns = np.searchsorted(kept, fed)
    runner = open_runner(Bundle.open(path))
    cache = runner.new_cache(1, len(fed))
    states = runner.forward(cache, fed[None], np.array([len(fed)]))[0, :-1]
    logits = runner.full_logits(states).astype(np.float64)
    top = logits.max(axis=1)
    nats = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
    nats -= logits[np.arange(len(logits)), columns[1:]]
    first = len(read_tokens(Bundle.open(path)).pieces[int(own[0])]) if mode == "both" else 3
    size = len(text.encode()) - first
    [spelling, _] = report.spelling
    assert spelling.tokens_after == len(own) > spelling.tokens_before
    assert spelling.bits_per_byte_after == pytest.approx(nats.sum() / math.log(2) / size, rel=1e-4)
    assert spelling.longer_documents == spelling.documents == 1
    assert report.longest[0].tokens_after == len(own) and report.longest[0].removed


def test_slices_add_up_and_name_texts_and_scripts(reports):
    report = reports["output"]
    whole = of(report, "all")
    for kind in ("text ", "script "):
        parts = [s for s in report.slices if s.name.startswith(kind)]
        assert sum(s.tokens for s in parts) == whole.tokens
        assert sum(s.bytes for s in parts) == whole.bytes
        assert sum(s.lost_mass * s.tokens for s in parts) == pytest.approx(
            whole.lost_mass * whole.tokens
        )
    names = [s.name for s in report.slices]
    assert names[:3] == ["all", "text prose", "text code"]
    assert {"script Latin", "script Han", "script symbols"} <= set(names)
    # The counted text is prose.
    assert of(report, "text code").lost_mass > of(report, "text prose").lost_mass
    assert report.kept_by_reason["bytes"] > 0 and sum(report.kept_by_reason.values()) == report.kept


def test_the_curve_meets_what_was_pruned(reports, both):
    report = reports["output"]
    assert report.curve is not None
    points = report.curve.points
    assert [p.kept for p in points] == sorted({p.kept for p in points})
    lost = [p.lost_mass for p in points]
    assert all(a >= b - 1e-12 for a, b in pairwise(lost))
    assert points[-1].kept == report.size and points[-1].lost_mass == 0
    assert points[-1].covered_tokens == 1
    # The last point but one keeps all counted tokens and their parts, as pruning did.
    assert points[-2].kept == report.kept
    assert points[-2].lost_mass == pytest.approx(of(report, "all").lost_mass, rel=1e-5)
    assert points[-2].covered_tokens == pytest.approx(of(report, "all").covered_tokens)
    assert points[-1].head_bytes == report.head_bytes_before


def test_the_suggested_cut_is_the_smallest_that_is_good_enough(reports):
    curve = reports["output"].curve
    assert curve is not None
    good = [p.kept for p in curve.points[:-1] if p.lost_mass <= 0.2]
    expected = min(good) if good else None
    assert curve.suggestion.kept == expected
    assert "20.000%" in curve.suggestion.reason


def test_a_head_with_the_row_of_another_token_shows_in_the_kl(
    both, bundle, checkpoint, short_text, tmp_path
):
    # The map says other rows than the head has.
    import shutil

    from headport.bundle import file_entry
    from headport.manifest import decode_manifest, encode_manifest
    from headport.validate.local_reference import LocalReference
    from headport.validate.reference import Reference

    wrong = tmp_path / "wrong"
    shutil.copytree(both["output"], wrong)
    ids = np.load(wrong / "vocab_map.npy")
    gone = np.setdiff1d(np.arange(ids[0], ids[-1]), ids)[0]  # a token that was dropped
    place = int(np.searchsorted(ids, gone))
    ids[place] = gone  # in the place of the next one that was kept
    np.save(wrong / "vocab_map.npy", ids)
    manifest = decode_manifest((wrong / "manifest.json").read_bytes(), "")
    files = manifest.files | {"vocab_map.npy": file_entry(wrong / "vocab_map.npy")}
    changed = msgspec.structs.replace(manifest, files=files)
    (wrong / "manifest.json").write_bytes(encode_manifest(changed))
    report = price_with(
        LocalReference(Reference(str(checkpoint))),
        Options(bundle=bundle, pruned=wrong, reference=str(checkpoint), text=(short_text,)),
    )
    assert of(report, "all").kl > 1e-4


def test_another_checkpoint_with_the_same_tokens_is_named(
    both, bundle, checkpoint, short_text, reports, reference_of, tmp_path
):
    from safetensors.numpy import load_file, save_file

    other = shutil.copytree(checkpoint, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"] *= 0.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    options = Options(bundle=bundle, pruned=both["both"], reference=str(other), text=(short_text,))
    wrong = "not the checkpoint the bundles were exported from"
    assert any(wrong in note for note in price_with(reference_of(other), options).notes)
    assert not any(wrong in note for note in reports["both"].notes)


def test_nothing_pruned_costs_nothing(bundle, pruned, checkpoint, texts, reference_of):
    same = pruned("output", min_count=0)
    report = price_with(
        reference_of(checkpoint),
        Options(bundle=bundle, pruned=same, reference=str(checkpoint), text=texts, max_tokens=200),
    )
    whole = of(report, "all")
    assert report.kept == report.size and whole.tokens == 200
    assert (whole.lost_mass, whole.covered_tokens) == (0, 1) and whole.kl < 1e-9
    [total, *_] = report.spelling
    assert total.bits_per_byte_after == pytest.approx(total.bits_per_byte_before)
    assert report.worst == report.removed == report.longest == ()
    assert report.curve is None and any("--counts" in note for note in report.notes)


def run(*argv: Any) -> int:
    return main(["price", *map(str, argv)])


def test_the_verb_writes_json_markdown_and_html(
    both, bundle, checkpoint, counts, texts, tmp_path, capsys
):
    files = [tmp_path / f"r.{kind}" for kind in ("json", "md", "html")]
    argv = [bundle, "--pruned", both["output"], "--reference", checkpoint, "--text", texts[0]]
    argv += ["--counts", counts, "--max-tokens", 60]
    outputs = ["--json", files[0], "--markdown", files[1], "--html", files[2]]
    assert run(*argv, *outputs) == 0
    text = capsys.readouterr().out
    assert "probability lost on 60 tokens" in text and "bits/byte reference" in text
    report = msgspec.json.decode(files[0].read_bytes(), type=PriceReport)
    assert report.slices[0].tokens == 60
    assert "ppl" not in json.dumps(json.loads(files[0].read_text())).lower()
    for file in files[1:]:
        page = file.read_text()
        assert "Positions that lose most" in page and "Suggested cut" in page
    assert "<script" not in files[2].read_text()
    assert run(*argv, *outputs) == 2
    assert "--force" in capsys.readouterr().err


def _options(**changes: Any) -> Options:
    usual = {"bundle": Path("b"), "pruned": Path("p"), "reference": "m:f", "text": (Path("t"),)}
    return Options(**(usual | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"text": ()}, UsageError, "at least one file expected"),
        ({"window": 0}, UsageError, "--window: at least 1 expected, 0 given"),
        ({"max_tokens": -1}, UsageError, "--max-tokens"),
        ({"max_lost_mass": 1.0}, UsageError, "--max-lost-mass: 0 or more"),
        ({"reference": "nowhere"}, CheckpointError, "nothing is there"),
        ({"markdown": Path("r"), "html": Path("r")}, UsageError, "given 2 times"),
    ],
)
def test_wrong_use_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        price_with(None, _options(**changes))  # type: ignore[arg-type]


def test_bundles_that_do_not_belong_together_are_refused(
    bundle, both, checkpoint, texts, counts, tiny_bundle, tiny_llama, reference_of, tmp_path
):
    usual = {"reference": str(checkpoint), "text": texts}
    reference = reference_of(checkpoint)
    with pytest.raises(UsageError, match="a bundle that `headport prune` wrote was expected"):
        price_with(reference, _options(bundle=bundle, pruned=bundle, **usual))
    with pytest.raises(UsageError, match="this one is pruned itself"):
        price_with(reference, _options(bundle=both["both"], pruned=both["both"], **usual))
    with pytest.raises(UsageError, match="made from the same checkpoint"):
        price_with(reference, _options(bundle=tiny_bundle, pruned=both["both"], **usual))
    other = _options(bundle=bundle, pruned=both["both"], text=texts, reference=str(tiny_llama))
    with pytest.raises((UsageError, ParityError), match="same vocabulary expected"):
        price_with(reference_of(tiny_llama), other)
    from headport.quantize.count.table import read_counts, write_counts

    found = read_counts(counts)
    record = msgspec.structs.replace(found.record, tokenizer_sha256="f" * 64)
    write_counts(tmp_path / "c.parquet", type(found)(found.counts, record), force=False)
    with pytest.raises(UsageError, match="counts by the tokenizer of"):
        price_with(
            reference,
            _options(bundle=bundle, pruned=both["both"], counts=tmp_path / "c.parquet", **usual),
        )
    existing = tmp_path / "r.md"
    existing.write_text(PROSE)
    with pytest.raises(OutputError, match="--force"):
        price_with(reference, _options(markdown=existing, **usual))
