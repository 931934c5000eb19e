"""Quantising and lowering heads that are not the LM head, by name or all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headport.bundle import Bundle
from headport.errors import LoweringError, ParityError, QuantizeError, UsageError
from headport.head_parts import all_parts
from headport.ledger import head_weight
from headport.lowering.command import Options as LowerOptions
from headport.lowering.command import lower
from headport.quantize import head as quantised_head
from headport.quantize.chosen_heads import chosen_heads
from headport.quantize.command import Options, quantize, run
from headport.runtime import Heads
from headport.selftest import run_selftest
from tests.head_models import head_modules

TEXTS = [[5, 9, 200, 13], [7, 3], [40, 41, 42, 43]]
LARGE = [
    *("lm", "later", "tree.members"),
    *("frequent.shortlist", "frequent.tail1", "frequent.tail2"),
]


def _options(bundle: Path, output: Path, **changes: Any) -> Options:
    return Options(**{"bundle": bundle, "output": output, "head": "int8", "block": 16} | changes)


@pytest.fixture(scope="module")
def smaller(headed_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(_options(headed_bundle, tmp_path_factory.mktemp("q") / "bundle")).path


def test_by_default_every_large_matrix_is_quantised(headed_bundle, smaller):
    bundle = Bundle.open(smaller)
    stored = {n for n, h in all_parts(bundle.manifest).items() if h.quantization is not None}
    assert stored == set(LARGE)
    stages = bundle.manifest.provenance.stages[1:]
    assert {stage.options.get("name", "lm") for stage in stages} == set(LARGE)
    for stage in stages:
        check = stage.report["check"]
        assert 0 < check["largest_share_of_bound"] <= 1
        assert stage.report["weight_bytes_after"] < stage.report["weight_bytes_before"]
    assert run_selftest(bundle)
    before = Bundle.open(headed_bundle)
    for name, head in all_parts(bundle.manifest).items():
        dtype = head_weight(bundle.manifest, head)[0].dtype
        assert dtype == ("int8" if name in LARGE else "float"), name
        assert head_weight(before.manifest, all_parts(before.manifest)[name])[0].dtype == "float"


def test_quantised_heads_answer_nearly_as_before(smaller):
    heads = Heads(smaller, threads=1)
    states = heads.encode(TEXTS)
    hidden = torch.from_numpy(np.concatenate(states.hidden))
    for name in ("frequent", "tree"):
        found = np.concatenate(heads.log_probs(states, name))
        expected = head_modules()[name].log_prob(hidden).detach().numpy()
        error = np.abs(found - expected).max()
        assert 1e-4 < error <= 2e-2 * np.abs(expected).max()
        assert (heads.predict(states, name)[0] == found[: len(TEXTS[0])].argmax(axis=1)).all()
    later = np.concatenate(heads.logits(states, "later"))
    expected = head_modules()["later"](hidden).detach().numpy()
    assert np.abs(later - expected).max() <= 2e-2 * np.abs(expected).max()


def test_one_head_or_one_part_by_name(headed_bundle, tmp_path):
    some = quantize(_options(headed_bundle, tmp_path / "q", name=("later", "frequent.tail2")))
    stored = {n for n, h in all_parts(some.manifest).items() if h.quantization is not None}
    assert stored == {"later", "frequent.tail2"}
    outcome = run(_options(headed_bundle, tmp_path / "t", name=("judge",)))
    for task in ("judge.mood", "judge.topic", "judge.toxic"):
        assert f"head {task} stored as int8, block 16" in outcome.text
    with pytest.raises(QuantizeError, match="head later is already stored as int8"):
        quantize(_options(some.path, tmp_path / "again", name=("later",)))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": ("nothing",)}, UsageError, "--name nothing: no such head in the bundle (heads:"),
        ({"name": ("reward",)}, QuantizeError, "the weight of a value head is one row"),
        ({"rescore": 0}, UsageError, "--rescore and --certify are for the head lm alone"),
        (
            {"name": ("later",), "calibration": (Path("README.md"),)},
            UsageError,
            "later get states that another graph makes of hidden states",
        ),
        ({"head": "none", "block": None, "name": ("later",)}, UsageError, "no meaning without"),
    ],
)
def test_what_cannot_be_done_is_refused(headed_bundle, tmp_path, changes, error, message):
    with pytest.raises(error) as caught:
        quantize(_options(headed_bundle, tmp_path / "q", **changes))
    assert message in str(caught.value) and not (tmp_path / "q").exists()


def test_the_lm_head_alone_can_be_certified(headed_bundle, tmp_path):
    made = quantize(_options(headed_bundle, tmp_path / "q", name=("lm",), certify=True))
    assert made.manifest.heads["lm"].outputs == "candidates"
    assert made.manifest.heads["later"].quantization is None
    assert run_selftest(made)


def test_the_check_fails_where_a_scale_is_swapped(headed_bundle, tmp_path, monkeypatch):
    store = quantised_head.store_head_weight

    def wrong(model: Any, weight: str, stored: Any, *rest: Any) -> str:
        if weight == "frequent.tail2.weight":
            stored.tensors["scale"][[0, 1]] = stored.tensors["scale"][[1, 0]]
        return store(model, weight, stored, *rest)

    monkeypatch.setattr(quantised_head, "store_head_weight", wrong)
    with pytest.raises(ParityError, match="does not multiply with the rounded weight"):
        quantize(_options(headed_bundle, tmp_path / "q"))


def test_lowered_parts_answer_like_the_portable_ones(smaller, tmp_path):
    lowered = lower(LowerOptions(bundle=smaller, output=tmp_path / "l", target="ort-cpu"))
    report = lowered.manifest.provenance.stages[-1].report
    assert set(report["parity"]["heads"]) == set(all_parts(lowered.manifest))
    for name in LARGE:
        head = all_parts(lowered.manifest)[name]
        assert head_weight(lowered.manifest, head)[1].endswith(".nbits"), name
    assert run_selftest(lowered)
    before, after = Heads(smaller, threads=1), Heads(lowered, threads=1)
    for name in ("frequent", "tree"):
        a = np.concatenate(before.log_probs(before.encode(TEXTS), name))
        b = np.concatenate(after.log_probs(after.encode(TEXTS), name))
        assert np.abs(a - b).max() < 5e-3 * np.abs(a).max()
    [one], [other] = before.values(before.encode(TEXTS[:1])), after.values(after.encode(TEXTS[:1]))
    assert np.allclose(one, other, atol=1e-4)


def test_tensorrt_refuses_heads_that_its_plans_cannot_run(headed_bundle, tmp_path):
    with pytest.raises(LoweringError, match="reward, judge, frequent, tree, later: TensorRT"):
        lower(LowerOptions(bundle=headed_bundle, output=tmp_path / "l", target="tensorrt"))


def test_heads_of_a_lowered_bundle_are_not_chosen(smaller, tmp_path):
    bundle = Bundle.open(smaller)
    import msgspec

    lowered = Bundle(smaller, msgspec.structs.replace(bundle.manifest, target="ort-cpu"))
    with pytest.raises(QuantizeError, match="is lowered to ort-cpu"):
        chosen_heads(lowered)
