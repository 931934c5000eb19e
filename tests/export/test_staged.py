"""A backbone that runs in pieces is the backbone that runs as a whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from headport.bundle import Bundle
from headport.errors import ParityError
from headport.export import parity, staged
from headport.export.checkpoint import find_checkpoint, load_model
from headport.export.parity import plan_parity, prove, reference_logits
from headport.export.staged import run_staged
from headport.runner import PortableRunner, open_runner
from headport.selftest import run_selftest


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "_SEGMENT_BYTES", 40_000)
    monkeypatch.setattr(parity, "_WHOLE_BYTES", 0)


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Bundle:
    return Bundle.open(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def work(runner: PortableRunner) -> list[np.ndarray]:
    rng = np.random.Generator(np.random.Philox(key=1))
    ids = rng.integers(0, 257, (2, 9))
    cache, other = runner.new_cache(2, 20), runner.new_cache(1, 20)
    found = [runner.forward(cache, ids, np.array([9, 5]))[:, :5]]
    found.append(runner.forward(other, ids[:1, :3], np.array([3])))
    found.append(runner.forward(cache, ids[:, :1], np.array([1, 1])))
    assert cache.lengths.tolist() == [10, 6]
    logits = runner.head(found[-1][:, 0]).logits
    assert logits is not None
    return [*found, logits]


def test_pieces_give_what_the_whole_gives(bundle: Bundle) -> None:
    before = {p.name for p in bundle.path.iterdir()}
    found, pieces = run_staged(bundle, work)
    assert pieces > 4
    whole = open_runner(bundle)
    assert isinstance(whole, PortableRunner)
    for mine, theirs in zip(found, work(whole), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5)
    assert {p.name for p in bundle.path.iterdir()} == before


def test_parity_and_self_test_run_in_pieces(tiny_llama: Path, bundle: Bundle) -> None:
    model = load_model(find_checkpoint(str(tiny_llama)))
    plan = plan_parity(257, 64, ())
    reference = reference_logits(model, plan)
    proof = prove(bundle, plan, reference)
    assert proof.report
    assert proof.report.pieces > 4
    assert len(proof.report.cases) == 5
    assert run_selftest(Bundle(bundle.path, proof.manifest))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "mlp.down_proj", "lm_head.weight"])
def test_a_changed_byte_range_is_noticed(name: str, tiny_llama: Path, bundle: Bundle) -> None:
    model = load_model(find_checkpoint(str(tiny_llama)))
    plan = plan_parity(257, 64, ())
    reference = reference_logits(model, plan)
    tensor = next(t for t in bundle.manifest.tensors if name in t.name)
    with (bundle.path / tensor.file).open("r+b") as stream:
        stream.seek(tensor.offset)
        rows = np.frombuffer(stream.read(tensor.length), np.float32)
        stream.seek(tensor.offset)
        stream.write(np.roll(rows, 64).tobytes())
    with pytest.raises(ParityError, match="do not answer like the checkpoint"):
        prove(bundle, plan, reference)
    assert not list(bundle.path.glob(".segment*"))


def test_a_long_row_asks_only_for_the_logits_it_compares(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(find_checkpoint(str(tiny_llama)))
    plan = plan_parity(257, 64, (40,))
    everything = reference_logits(model, plan)
    monkeypatch.setattr(parity, "_LOGITS_BYTES", 0)
    sizes: list[int] = []
    model.lm_head.register_forward_hook(lambda *call: sizes.append(call[2].shape[1]))
    for mine, theirs in zip(reference_logits(model, plan), everything, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(theirs))
    assert sizes == [len(scored) for scored in plan.scored]
