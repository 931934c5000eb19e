"""Heads beside the LM head: what is written, what is refused, and that parity can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headport.bundle import Bundle
from headport.errors import CheckpointError, ExportError, ParityError, UsageError
from headport.export.command import Options, export, run
from headport.export.head_parity import (
    HeadParity,
    HeadReference,
    check_heads,
    compare_heads,
    measure_heads,
)
from headport.export.heads import MultiTaskHead, ValueHead, load_head, save_head
from headport.export.heads import exported as exported_heads
from headport.export.heads.attach import GivenHead, export_heads, given_heads
from headport.export.source import find_checkpoint
from headport.inspection import describe
from headport.manifest import AdaptiveHead, TasksHead, TreeHead
from headport.manifest import ValueHead as ValueEntry
from headport.runner import open_runner
from headport.runtime import Heads
from headport.selftest import run_selftest
from tests.head_models import HIDDEN, VOCAB, head_modules, randomise, save_modules


@pytest.fixture(scope="module")
def headed(headed_bundle: Path) -> Bundle:
    return Bundle.open(headed_bundle)


def test_every_head_is_in_the_manifest_and_proved(headed):
    assert list(headed.manifest.heads) == ["lm", "later"]
    kinds = {name: type(head) for name, head in headed.manifest.task_heads.items()}
    assert kinds == {
        "reward": ValueEntry,
        "judge": TasksHead,
        "frequent": AdaptiveHead,
        "tree": TreeHead,
    }
    parity = headed.manifest.provenance.stages[-1].report["parity"]["heads"]
    assert set(parity) == {"reward", "judge", "later", "frequent", "tree"}
    for name, found in parity.items():
        assert (
            max(found["cases"].values()) <= found["limit"] == pytest.approx(2e-4 * found["largest"])
        )
        assert len(found["cases"]) == 5, name
    assert parity["reward"]["same_choice"] is None and parity["later"]["same_choice"] > 0.99
    assert parity["tree"]["sum_error"] < 1e-6 and parity["judge"]["sum_error"] is None
    chosen = headed.manifest.provenance.stages[-1].options["head"]
    assert "reward=reward.safetensors" in chosen


def test_inspect_names_each_head_and_its_parts(headed):
    text = " ".join(describe(headed, run_selftest(headed)).text().split())
    for line in (
        "head reward value, one scalar per position: from the file reward.safetensors",
        "tasks mood (bad, good), topic (a, b, c), toxic (0), per text, at its last token",
        "adaptive softmax over 257 tokens, cut at 40, 120",
        "tail2: 137 outputs, not quantised, after the graph head.frequent.projection2",
        "tree softmax over 257 tokens in 11 classes",
        "head later [257, hidden] logits, not quantised, after the graph head.later.blocks",
        "head judge max |Δ|",
    ):
        assert line in text, text


def test_the_selftest_covers_each_head(headed, tmp_path):
    import shutil

    assert run_selftest(headed)
    for name in ("reward.values", "judge.mood", "frequent.log_probs"):
        copy = tmp_path / name
        shutil.copytree(headed.path, copy)
        stored = load_file(copy / "selftest.safetensors")
        stored[name] = stored[name] * 1.01 + 1e-3
        save_file(stored, copy / "selftest.safetensors")
        found = run_selftest(Bundle.open(copy, verify=False))
        broken = name.partition(".")[0]
        assert not found
        assert found.task_heads_error[broken] > found.tolerance.task_heads[broken]
        assert found.logits_error["lm"] == 0


def test_parity_fails_where_a_written_weight_is_another(tiny_llama, tmp_path):
    build, done = exported_heads.build_head, []

    def wrong(transform: Any, name: str) -> Any:
        if name == "head.frequent.tail2":
            done.append(name)
            weight = transform.weight.clone()
            weight[0] += 0.05
            transform = replace(transform, weight=weight)
        return build(transform, name)

    [spec] = save_modules(tmp_path, {"frequent": head_modules()["frequent"]})
    with (
        mock.patch.object(exported_heads, "build_head", wrong),
        pytest.raises(ParityError, match="head frequent: the written files do not answer"),
    ):
        export(Options(model=str(tiny_llama), output=tmp_path / "out", head=(spec,)))
    assert done and not (tmp_path / "out").exists()


@pytest.mark.parametrize("head", ["reward", "judge", "later", "frequent", "tree"])
def test_each_kinds_parity_can_fail(headed, head):
    rows = np.random.default_rng(3).normal(size=(9, HIDDEN)).astype(np.float32)
    runner, module = open_runner(headed), head_modules()[head]
    right = _parity(headed, runner, head, module, rows)
    assert right and right.same_choice in (None, 1.0)
    with torch.no_grad():
        list(module.parameters())[-1].view(-1)[0] += 0.05
    wrong = _parity(headed, runner, head, module, rows)
    assert not wrong
    with pytest.raises(ParityError, match=f"head {head}: the written files do not answer"):
        check_heads({head: wrong})


def _parity(bundle: Bundle, runner: Any, head: str, module: Any, rows: np.ndarray) -> HeadParity:
    made = export_heads(
        [GivenHead(head, module, "")],
        hidden_size=HIDDEN,
        rows=VOCAB,
        tokens=VOCAB,
        dtype=torch.float32,
    )
    with torch.no_grad():
        answers = {k: v.numpy() for k, v in made[0].reference(torch.from_numpy(rows)).items()}
    references = [HeadReference(head, (answers,))]
    measured = {"alone": measure_heads(bundle, runner, references, [rows])}
    return compare_heads(references, measured, 2e-4)[head]


def test_probabilities_that_do_not_sum_to_one_fail():
    found = HeadParity({"alone": 0.0}, 1.0, 1.0, 1.0, sum_error=2e-6)
    with pytest.raises(ParityError, match="head x: its probabilities sum to 1 ± 2e-06"):
        check_heads({"x": found})


def test_half_precision(tiny_llama, tmp_path):
    modules = {name: head_modules()[name] for name in ("reward", "frequent")}
    heads = tuple(save_modules(tmp_path, modules))
    bundle = export(
        Options(model=str(tiny_llama), output=tmp_path / "out", head=heads, dtype="fp16")
    )
    states = Heads(bundle, threads=1).encode([[1, 2, 3, 4]])
    hidden = torch.from_numpy(np.concatenate(states.hidden))
    [found] = Heads(bundle, threads=1).log_probs(states, "frequent")
    expected = modules["frequent"].log_prob(hidden).detach().numpy()
    assert np.abs(found - expected).max() <= 2e-2 * np.abs(expected).max()


def trl_checkpoint(folder: Path, source: Path, **tensors: torch.Tensor) -> Path:
    """A checkpoint as TRL saves a model with a value head: its tensors among the model's."""
    import shutil

    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return folder


def test_a_value_head_in_the_checkpoint_is_found(tiny_llama, tmp_path):
    weight, bias = torch.randn(1, HIDDEN), torch.randn(1)
    names = {"v_head.summary.weight": weight, "v_head.summary.bias": bias}
    folder = trl_checkpoint(tmp_path / "trl", tiny_llama, **names)
    outcome = run(Options(model=str(folder), output=tmp_path / "found", head=("critic=auto",)))
    assert "head critic: value, one scalar per position" in outcome.text
    bundle = Bundle.open(tmp_path / "found")
    assert list(bundle.manifest.task_heads) == ["critic"]
    report = bundle.manifest.provenance.stages[-1].report
    assert report["weights"]["name"] == "streamed" and not report["weights"]["unused"]
    heads = Heads(bundle, threads=1)
    states = heads.encode([[1, 2, 3]])
    hidden = torch.from_numpy(states.hidden[0])
    expected = (hidden @ weight.T + bias)[:, 0].numpy()
    assert np.abs(heads.values(states)[0] - expected).max() < 2e-4 * np.abs(expected).max()


def test_a_value_head_that_is_found_has_a_name(tiny_llama, tmp_path):
    folder = trl_checkpoint(
        tmp_path / "trl", tiny_llama, **{"v_head.summary.weight": torch.ones(1, HIDDEN)}
    )
    [found] = given_heads(find_checkpoint(str(folder)), ())
    assert found.name == "value" and found.module.summary.bias is None
    [spec] = save_modules(tmp_path, {"value": ValueHead(HIDDEN)})
    message = str(_refused(folder, tmp_path, spec).value)
    assert "holds a head that has that name; give that one another name" in message


def test_a_value_head_of_a_layout_that_is_not_known_is_refused(tiny_llama, tmp_path):
    names = {"v_head.0.weight": torch.randn(8, HIDDEN), "v_head.2.weight": torch.randn(1, 8)}
    folder = trl_checkpoint(tmp_path / "trl", tiny_llama, **names)
    with pytest.raises(CheckpointError, match=r"one linear layer .* v_head.0.weight \[8, 64\]"):
        export(Options(model=str(folder), output=tmp_path / "out"))


def _config(file: Path, change: Any) -> None:
    tensors, document = load_file(file), json.loads(_metadata(file)["headport.head"])
    change(document, tensors)
    save_file(tensors, file, metadata={"headport.head": json.dumps(document)})


def _metadata(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as stream:
        return stream.metadata()


def _refused(
    tiny_llama: Path, tmp_path: Path, *heads: str, pickle: bool = False
) -> pytest.ExceptionInfo[Exception]:
    options = Options(
        model=str(tiny_llama), output=tmp_path / "out", head=heads, allow_pickle=pickle
    )
    with pytest.raises((UsageError, CheckpointError, ExportError)) as caught:
        export(options)
    assert not (tmp_path / "out").exists() and "\n" not in str(caught.value)
    return caught


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (("value",), "--head value: NAME=FILE or NAME=auto was expected"),
        (("a.b=x",), "--head a.b=x: NAME=FILE or NAME=auto was expected"),
        (("lm=x",), "the name lm is the model's own head"),
        (("v=x", "v=y"), "the name v was given twice"),
        (("v=auto", "w=auto"), "give `auto` once"),
        (("v=auto",), "holds no head beside its own"),
        (("v=/nowhere/x.safetensors",), "a file with a head was expected, nothing is there"),
    ],
)
def test_requests_that_cannot_be_met(heads, message, tiny_llama, tmp_path):
    assert message in str(_refused(tiny_llama, tmp_path, *heads).value)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            lambda: ValueHead(48),
            "reads hidden states of 48 values, the model gives 64; it was trained for another",
        ),
        (
            lambda: torch.nn.AdaptiveLogSoftmaxWithLoss(HIDDEN, 99, [20]),
            "gives 99 tokens, the model's vocabulary has 257",
        ),
        (
            lambda: ValueHead(HIDDEN, pooling="last", pad_id=VOCAB),
            "its padding token 257 is none of the model's 257 tokens",
        ),
    ],
)
def test_heads_that_do_not_fit_the_model(module, message, tiny_llama, tmp_path):
    [spec] = save_modules(tmp_path, {"odd": randomise(module(), 0)})
    assert message in str(_refused(tiny_llama, tmp_path, spec).value)


def test_a_weight_that_is_not_a_number(tiny_llama, tmp_path):
    module = head_modules()["judge"]
    with torch.no_grad():
        module.tasks["topic"].weight[1, 3] = float("nan")
    [spec] = save_modules(tmp_path, {"judge": module})
    message = str(_refused(tiny_llama, tmp_path, spec).value)
    assert "head judge.topic: its weight holds NaN or infinity" in message


def test_cutoffs_that_do_not_ascend(tiny_llama, tmp_path):
    [spec] = save_modules(tmp_path, {"odd": head_modules()["frequent"]})
    file = Path(spec.partition("=")[2])
    _config(file, lambda d, _: d["config"].update(cutoffs=[120, 40]))
    message = str(_refused(tiny_llama, tmp_path, spec).value)
    assert "cutoffs in ascending order were expected, [120, 40] were found" in message


def test_a_file_that_is_no_head(tiny_llama, tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"weight": torch.zeros(2, 2)}, file)
    assert "or v_head.* tensors, were expected, found weight" in str(
        _refused(tiny_llama, tmp_path, f"x={file}").value
    )
    file.write_bytes(b"nonsense")
    assert "cannot be read" in str(_refused(tiny_llama, tmp_path, f"x={file}").value)
    save_head(head_modules()["reward"], file)
    _config(file, lambda _, tensors: tensors.pop("summary.bias"))
    assert load_head(file).summary.bias is None  # a head without one
    _config(file, lambda _, tensors: tensors.pop("inner.linear.bias"))
    assert "not those of the head its metadata names" in str(
        _refused(tiny_llama, tmp_path, f"x={file}").value
    )


def test_a_pickled_head_needs_leave(tiny_llama, tmp_path):
    file = tmp_path / "value_head.bin"
    torch.save({"v_head.summary.weight": torch.randn(1, HIDDEN)}, file)
    assert "pass --allow-pickle" in str(_refused(tiny_llama, tmp_path, f"x={file}").value)
    assert load_head(file, allow_pickle=True).summary.weight.shape == (1, HIDDEN)


@pytest.mark.parametrize("name", ["reward", "judge", "later", "frequent", "tree"])
def test_a_head_comes_back_as_it_was_saved(name, tmp_path):
    module = head_modules()[name]
    save_head(module, tmp_path / "x.safetensors")
    again = load_head(tmp_path / "x.safetensors")
    assert type(again) is type(module)
    assert all(
        torch.equal(a, b)
        for a, b in zip(module.state_dict().values(), again.state_dict().values(), strict=True)
    )
    assert getattr(again, "config", None) == getattr(module, "config", None)


def test_a_module_that_is_no_head_is_not_saved(tmp_path):
    with pytest.raises(UsageError, match="a head of class ValueHead, MultiTaskHead"):
        save_head(torch.nn.Linear(2, 2), tmp_path / "x.safetensors")


def test_a_tree_is_trained_by_the_loss_of_its_log_probs():
    module = head_modules()["tree"]
    hidden = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(0))
    target = torch.arange(20) * 12
    expected = -module.log_prob(hidden)[torch.arange(20), target].mean()
    assert torch.allclose(module(hidden, target), expected, atol=1e-5)


def test_a_multi_task_head_takes_a_task_per_row():
    module = MultiTaskHead(8, {"a": 2, "b": ["x", "y", "z"]}, inner_size=4)
    found = module(torch.randn(3, 8), ["b", "a", "b"])
    assert [len(scores) for scores in found] == [3, 2, 3]


def test_an_encoder_decoder_with_a_value_head_is_refused(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    folder = trl_checkpoint(
        tmp_path / "trl", tmp_path / "t5", **{"v_head.summary.weight": torch.ones(1, 16)}
    )
    message = str(_refused(folder, tmp_path).value)
    assert "v_head.* in the checkpoint" in message and "an encoder-decoder model" in message
