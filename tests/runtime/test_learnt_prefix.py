"""Learnt tokens in the caches: every way to run a bundle answers as if they had been read.

A learnt prompt whose embeddings are those of real tokens must answer like these tokens before every
prompt, and that is known from the bundle without an adapter.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

from headport.bundle import Bundle, file_entry
from headport.errors import BundleError, LoweringError, PromptError, UsageError
from headport.export.command import Options, export
from headport.inspection import describe
from headport.learnt_prefix import PREFIX_FILE
from headport.lowering.command import Options as LowerOptions
from headport.lowering.command import lower
from headport.manifest import encode_manifest
from headport.merge.command import Options as MergeOptions
from headport.merge.command import merge
from headport.quantize.command import Options as QuantizeOptions
from headport.quantize.command import quantize
from headport.runner import open_runner
from headport.runtime import Generator, Heads
from headport.runtime.engine.options import Options as EngineOptions
from headport.runtime.scheduling.capacity import slot_bytes
from headport.runtime.triton.command import Options as TritonOptions
from headport.runtime.triton.command import triton
from headport.selftest import run_selftest
from headport.session import SessionSettings
from headport.slots import SeparateSlots
from tests.learnt_adapters import write_learnt

BEFORE = [7, 250, 31, 4, 118]  # the real tokens that the learnt ones are
CONTEXT = 64 - len(BEFORE)
PROMPTS = [[81, 3, 200], [9], [33, 12, 250, 8, 8, 61, 90]]


@pytest.fixture(scope="module")
def learnt(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("learnt")
    rows = load_torch(tiny_llama / "model.safetensors")["model.embed_tokens.weight"][BEFORE]
    adapter = write_learnt(folder / "adapter", "PROMPT_TUNING", rows)
    return export(Options(model=str(tiny_llama), output=folder / "b", adapter=adapter))


@pytest.fixture(scope="module")
def lowered(learnt: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    output = tmp_path_factory.mktemp("learnt") / "lowered"
    return lower(LowerOptions(bundle=learnt.path, output=output, target="ort-cpu"))


@pytest.fixture(scope="module", params=["portable", "ort-cpu"])
def bundle(request: pytest.FixtureRequest, learnt: Bundle, lowered: Bundle) -> Bundle:
    return learnt if request.param == "portable" else lowered


@pytest.fixture(scope="module")
def plain(tiny_bundle: Path):
    with Generator(tiny_bundle) as generator:
        yield generator


def test_every_call_answers_as_if_the_tokens_had_been_read(bundle: Bundle, plain: Generator):
    told = [[*BEFORE, *ids] for ids in PROMPTS]
    calls = (
        {"max_new_tokens": 12, "logprobs": 2},
        {"max_new_tokens": 6, "temperature": 0.9, "seed": 5, "n": 3},
        {"max_new_tokens": 6, "num_beams": 3, "n": 2},
    )
    with Generator(bundle, slots=2, prefill_chunk=2) as generator:
        for options in calls:
            found, expected = (
                generator.generate(PROMPTS, **options),
                plain.generate(told, **options),
            )
            assert [r.token_ids for r in found] == [r.token_ids for r in expected]
        logits = generator.logits(PROMPTS[2])
        expected = plain.logits(told[2])[len(BEFORE) :]
        assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
        score = generator.score([PROMPTS[2]])[0].nll
        assert np.allclose(score[1:], plain.score([told[2]])[0].nll[len(BEFORE) + 1 :], atol=1e-4)
        streamed = [token.token_id for token in generator.stream(PROMPTS[0], max_new_tokens=12)]
        assert streamed == plain.generate([told[0]], max_new_tokens=12)[0].token_ids


def test_what_a_slot_keeps_begins_with_them(bundle: Bundle, plain: Generator):
    """A slot taken over, cut, copied and moved beside others still begins with the tokens."""
    long = [(5 * n) % 257 for n in range(30)]
    prompts = [long, [*long[:20], 9, 9], [1, 2], long, [*long[:8], 3]]
    expected = plain.generate([[*BEFORE, *ids] for ids in prompts], max_new_tokens=5)
    with Generator(bundle, slots=2, prefill_chunk=4) as generator:
        first = generator.generate(prompts[:2], max_new_tokens=5)
        found = [*first, *generator.generate(prompts[2:], max_new_tokens=5)]
        assert generator.stats.reused_tokens > 20
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]


def test_slots_one_after_the_other(bundle: Bundle):
    runner = open_runner(bundle, SessionSettings(threads=1))
    apart = SeparateSlots(runner, 2, 20)
    ids = np.array([PROMPTS[2], PROMPTS[2]])
    found = apart.forward([0, 1], ids, np.array([7, 4]))
    shared = runner.new_slots(3, 20)
    shared.forward([1], ids[:1], np.array([7]))
    shared.cut(1, 0)
    together = shared.forward([0, 1], ids, np.array([7, 4]))
    assert np.abs(found[0] - together[0]).max() < 1e-4
    assert np.abs(found[1, :4] - together[1, :4]).max() < 1e-4
    shared.copy(0, 2, 7)
    next_ids = np.array([[5], [5]])
    pair = shared.forward([0, 2], next_ids, np.ones(2, np.int64))
    assert np.abs(pair[0] - pair[1]).max() < 1e-5


def test_they_take_their_part_of_the_context(learnt: Bundle, bundle: Bundle, plain: Generator):
    manifest = bundle.manifest
    assert manifest.model.max_context == CONTEXT and manifest.positions == 64
    assert slot_bytes(bundle, CONTEXT) == slot_bytes(plain.bundle, 64)
    with Generator(bundle) as generator:
        whole = list(range(CONTEXT - 3))
        [reply] = generator.generate([whole], max_new_tokens=3, eos_token_id=[])
        expected = plain.generate([[*BEFORE, *whole]], max_new_tokens=3, eos_token_id=[])
        assert reply.token_ids == expected[0].token_ids
        with pytest.raises(PromptError, match=f"the context holds {CONTEXT}"):
            generator.generate([whole], max_new_tokens=4)


def test_heads_and_the_self_test(bundle: Bundle, plain: Generator):
    heads = Heads(bundle.path)
    found = heads.logits(heads.encode(PROMPTS))[2]
    expected = plain.logits([*BEFORE, *PROMPTS[2]])[len(BEFORE) :]
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert run_selftest(bundle)
    assert "5 learnt tokens (PROMPT_TUNING) before every sequence" in describe(bundle).text()


def test_a_quantised_bundle_keeps_them(learnt: Bundle, plain: Generator, tmp_path: Path):
    quantised = quantize(QuantizeOptions(learnt.path, tmp_path / "q", head="int8", certify=True))
    assert quantised.manifest.prefix == learnt.manifest.prefix
    with Generator(quantised) as generator:
        found = generator.generate(PROMPTS, max_new_tokens=6)
    expected = plain.generate([[*BEFORE, *ids] for ids in PROMPTS], max_new_tokens=6)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]


def test_a_device_s_runner_begins_with_them(learnt: Bundle, plain: Generator, tmp_path: Path):
    made = lower(LowerOptions(bundle=learnt.path, output=tmp_path / "c", target="ort-cuda"))
    runner = open_runner(made, SessionSettings(provider="cpu"))
    slots = runner.new_slots(2, 20)
    hidden = slots.forward([0, 1], np.array([PROMPTS[0]] * 2), np.array([3, 2]))
    expected = plain.hidden_states([*BEFORE, *PROMPTS[0]])[len(BEFORE) :]
    assert np.abs(hidden[0] - expected).max() < 1e-3
    step = slots.forward([1], np.array([[PROMPTS[0][2]]]), np.array([1]))
    assert np.abs(step[0, 0] - expected[2]).max() < 1e-3


def changed(bundle: Bundle, folder: Path, tensors: dict[str, np.ndarray] | None) -> Bundle:
    """The bundle with another file of learnt tokens, sealed as if it were its own."""
    shutil.copytree(bundle.path, folder)
    file = folder / PREFIX_FILE
    files = dict(bundle.manifest.files)
    if tensors is None:
        file.unlink()
        del files[PREFIX_FILE]
    else:
        save_file(tensors, file)
        files[PREFIX_FILE] = file_entry(file)
    manifest = msgspec.structs.replace(bundle.manifest, files=files)
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))
    return Bundle.open(folder)


def test_another_file_of_them_is_found(learnt: Bundle, tmp_path: Path):
    own = load_file(learnt.path / PREFIX_FILE)
    first = "past_key_values.0.key"
    cases = {
        "cannot be read": None,
        "value is missing": {k: v for k, v in own.items() if not k.endswith("1.value")},
        r"0\.key is \[2, 4, 16\], \[2, 5, 16\] was": own | {first: own[first][:, :4].copy()},
        "0.key is not finite as float": own | {first: np.full_like(own[first], np.nan)},
        "more is no cache input": own | {"more": own[first]},
    }
    for n, (message, tensors) in enumerate(cases.items()):
        with pytest.raises(BundleError, match=message):
            open_runner(changed(learnt, tmp_path / str(n), tensors))
    swapped = own | {first: own["past_key_values.1.key"]}
    assert not run_selftest(changed(learnt, tmp_path / "swapped", swapped))


def test_what_cannot_begin_with_them_is_refused(learnt: Bundle, tmp_path: Path):
    from headport.runtime.engine import command

    why = r"begins every sequence with 5 learnt tokens \(PROMPT_TUNING\), .*answer without them; "
    with pytest.raises(UsageError, match=why + r"run it with headport\.runtime"):
        merge(MergeOptions(learnt.path, tmp_path / "m"))
    with (
        mock.patch.object(command, "check"),  # whether TensorRT is installed
        pytest.raises(UsageError, match=why + "lower it to ort-cuda or ort-cpu"),
    ):
        command.engine(EngineOptions(learnt.path, tmp_path / "e", backend="tensorrt"))
    with pytest.raises(UsageError, match=why + "use --backend python"):
        triton(TritonOptions(learnt.path, tmp_path / "t", backend="onnxruntime"))
    with pytest.raises(LoweringError, match=r"5 learnt tokens .*; lower to ort-cpu or ort-cuda"):
        lower(LowerOptions(bundle=learnt.path, output=tmp_path / "l", target="tensorrt"))
