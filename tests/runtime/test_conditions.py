"""Conditions added to hidden states: equal to PyTorch, projected once, refused where wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from headport.bundle import Bundle
from headport.condition import CONDITION_FILE, read_conditions
from headport.errors import BundleError, CheckpointError, ExportError, RequestError, UsageError
from headport.export.checkpoint import find_checkpoint, load_model
from headport.export.command import Options, export
from headport.export.heads import ConditionProjection, save_condition
from headport.inspection import describe
from headport.lowering.command import Options as LowerOptions
from headport.lowering.command import lower
from headport.quantize.command import Options as QuantizeOptions
from headport.quantize.command import quantize
from headport.runtime import Generator
from tests.conftest import llama_config, save_model

HIDDEN, SIZE = 64, 5
PROMPTS = [[7, 81, 3, 200], [9, 4], [33, 12, 250, 8, 8, 61]]
DYNAMIC = np.array([0.3, -1.0, 2.0, 0.1, -0.4], np.float32)


@pytest.fixture(scope="module")
def projection() -> ConditionProjection:
    torch.manual_seed(3)
    made = ConditionProjection(SIZE, HIDDEN)
    with torch.no_grad():
        made.linear.weight.normal_(0.0, 1.0)
        made.linear.bias.normal_(0.0, 0.3)
    return made.eval()


@pytest.fixture(scope="module")
def fixed() -> dict[str, torch.Tensor]:
    return {"formal": torch.tensor([1.0, 0, 0, 2, 0]), "casual": torch.tensor([0.0, 3, 0, 0, 1])}


@pytest.fixture(scope="module")
def file(projection, fixed, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("condition") / "style.safetensors"
    save_condition(projection, path, fixed)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    config = llama_config(num_hidden_layers=1)
    return save_model(tmp_path_factory.mktemp("checkpoint") / "one", config)


@pytest.fixture(scope="module")
def portable(checkpoint, file, tmp_path_factory) -> Bundle:
    output = tmp_path_factory.mktemp("bundle") / "conditioned"
    return export(Options(model=str(checkpoint), output=output, condition=file))


@pytest.fixture(scope="module")
def lowered(portable, tmp_path_factory) -> Bundle:
    output = tmp_path_factory.mktemp("bundle") / "lowered"
    return lower(LowerOptions(bundle=portable.path, target="ort-cpu", output=output))


@pytest.fixture(scope="module")
def model(checkpoint) -> Any:
    return load_model(find_checkpoint(str(checkpoint)))


def torch_logits(model: Any, projection: Any, ids: list[int], condition: Any) -> np.ndarray:
    def tell(_: Any, given: Any) -> Any:
        return None if condition is None else (given[0] + projection(condition),)

    hook = model.lm_head.register_forward_pre_hook(tell)
    try:
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    finally:
        hook.remove()


def torch_greedy(model: Any, projection: Any, prompt: list[int], condition: Any) -> list[int]:
    ids = list(prompt)
    for _ in range(8):
        ids.append(int(torch_logits(model, projection, ids, condition)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(params=["portable", "lowered"])
def generator(request, portable, lowered):
    bundle = {"portable": portable, "lowered": lowered}[request.param]
    with Generator(bundle, threads=1, prefill_chunk=2) as made:
        yield made


def test_rows_of_one_batch_answer_to_their_own_conditions(generator, model, projection, fixed):
    given = ["formal", None, DYNAMIC]
    values = [fixed["formal"], None, torch.from_numpy(DYNAMIC)]
    replies = generator.generate(PROMPTS, condition=given, max_new_tokens=8, eos_token_id=())
    plain = generator.generate(PROMPTS, max_new_tokens=8, eos_token_id=())
    for prompt, value, reply in zip(PROMPTS, values, replies, strict=True):
        assert reply.token_ids == torch_greedy(model, projection, prompt, value)
    assert replies[1].token_ids == plain[1].token_ids
    assert replies[0].token_ids != plain[0].token_ids
    found = generator.logits(PROMPTS[2], condition=DYNAMIC)
    expected = torch_logits(model, projection, PROMPTS[2], values[2])
    assert np.abs(found - expected).max() <= 2e-4 * np.abs(expected).max()
    [score] = generator.score([PROMPTS[2]], condition=DYNAMIC)
    nll = -torch.log_softmax(torch.from_numpy(expected[:-1]), -1)
    wanted = nll[torch.arange(5), torch.tensor(PROMPTS[2][1:])].sum()
    assert score.nll.sum() == pytest.approx(float(wanted), rel=1e-4)


def test_streams_and_beams_answer_to_it_too(generator):
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": ()}
    [whole] = generator.generate([PROMPTS[0]], condition="casual", **options)
    streamed = [t.token_id for t in generator.stream(PROMPTS[0], condition="casual", **options)]
    assert streamed == whole.token_ids
    [beam] = generator.generate([PROMPTS[0]], condition="casual", num_beams=3, **options)
    [other] = generator.generate([PROMPTS[0]], num_beams=3, **options)
    text = PROMPTS[0] + beam.token_ids
    [likely] = generator.score([text], condition="casual", prompt_tokens=len(PROMPTS[0]))
    assert beam.score == pytest.approx(-likely.nll.sum() / len(beam.token_ids), rel=1e-4)
    assert beam.token_ids != other.token_ids


def test_a_certified_head_proves_its_tokens_under_a_condition(portable, tmp_path):
    options = QuantizeOptions(portable.path, tmp_path / "q", head="int8", rescore=64, certify=True)
    given: dict[str, Any] = {"condition": "formal", "max_new_tokens": 12, "eos_token_id": ()}
    with Generator(quantize(options), threads=1) as exact, Generator(portable) as plain:
        found, expected = exact.generate(PROMPTS, **given), plain.generate(PROMPTS, **given)
        assert exact.exact and exact.stats.certified > 0
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]


def test_a_named_condition_is_projected_once(generator):
    options: dict[str, Any] = {"condition": "formal", "max_new_tokens": 4}
    first = generator.generate(PROMPTS, **options)
    assert generator.stats.condition_runs == 1
    second = generator.generate(PROMPTS, **options)
    assert generator.stats.condition_runs == 1
    assert [r.token_ids for r in first] == [r.token_ids for r in second]
    before = generator.stats.reused_tokens
    generator.generate(PROMPTS, condition="casual", max_new_tokens=1)
    generator.generate(PROMPTS, condition=DYNAMIC, max_new_tokens=1)
    assert generator.stats.condition_runs == 3
    assert generator.stats.reused_tokens > before  # caches know nothing of conditions


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("rude", "no condition 'rude' in this bundle; known are casual, formal"),
        (np.zeros(4, np.float32), r"5 numbers, \[4\] was given"),
        (np.zeros((1, 5), np.float32), r"5 numbers, \[1, 5\] was given"),
        (1.0, r"5 numbers, 1\.0 was given"),
        ([float("nan")] * 5, "must be finite"),
        (["formal"], "one for each of the 3 prompts, was expected; 1 were given"),
    ],
)
def test_wrong_conditions(generator, condition, message):
    with pytest.raises(RequestError, match=message):
        generator.generate(PROMPTS, condition=condition)


def test_bundles_without_conditions_refuse_them(tiny_bundle):
    with (
        Generator(tiny_bundle) as generator,
        pytest.raises(RequestError, match="takes none; export the model with --condition"),
    ):
        generator.generate([PROMPTS[0]], condition="formal")


def test_it_is_part_of_every_form_of_the_bundle(portable, lowered):
    for bundle in (portable, lowered):
        assert CONDITION_FILE in bundle.manifest.files
        assert "5 values, projected and added" in describe(bundle).text()
    assert portable.manifest.provenance.stages[0].options["condition"] == "style.safetensors"


def test_files_that_do_not_fit(file, tmp_path, checkpoint, fixed):
    with pytest.raises(BundleError, match="hidden states of 64 values, the model gives 32"):
        read_conditions(file, 32)
    damages: dict[str, Any] = {
        r"weight \[hidden size, condition size\]": lambda t: t.pop("bias"),
        r"fixed.formal: fixed.NAME \[5\]": lambda t: t.update({"fixed.formal": np.zeros(2)}),
        "extra: fixed.NAME": lambda t: t.update(extra=np.zeros(5, np.float32)),
        "bias hold NaN": lambda t: t["bias"].fill(np.nan),
    }
    broken = tmp_path / "broken.safetensors"
    for message, damage in damages.items():
        tensors = load_file(file)
        damage(tensors)
        save_file(tensors, broken)
        with pytest.raises(BundleError, match=message):
            read_conditions(broken, HIDDEN)
    wide = tmp_path / "wide.safetensors"
    save_condition(ConditionProjection(SIZE, 32), wide)
    with pytest.raises(CheckpointError, match=r"--condition: .*trained with another model"):
        export(Options(model=str(checkpoint), output=tmp_path / "b", condition=wide))
    assert not (tmp_path / "b").exists()
    with pytest.raises(UsageError, match="fixed condition 'x': a name and 4 values"):
        save_condition(ConditionProjection(4, 8), wide, {"x": fixed["formal"]})


def test_other_models_take_none(tmp_path, file):
    from transformers import LlamaForSequenceClassification

    folder = tmp_path / "classifier"
    LlamaForSequenceClassification(llama_config(num_labels=2)).save_pretrained(folder)
    with pytest.raises(ExportError, match="this is a sequence model; leave the option out"):
        export(Options(model=str(folder), output=tmp_path / "b", condition=file))
