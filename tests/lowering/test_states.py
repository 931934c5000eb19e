"""Recurrent layers on ort-cpu: states beside caches in place, and what stays portable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import pytest

from headport.bundle import Bundle
from headport.lowering.command import Options, lower
from headport.lowering.in_place import add_step_inputs
from headport.lowering.states import lower_states
from headport.runner import Runner, open_runner
from headport.runtime.generator import Generator
from headport.session import open_session
from tests.conftest import VOCAB_SIZE
from tests.recurrent_models import recurrent_bundle

FAMILIES = ["lfm2", "mamba", "mamba2", "qwen3_5"]
Lowered = Callable[[str], tuple[Bundle, Bundle]]
_made: dict[str, Bundle] = {}


@pytest.fixture
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    """Family → its portable bundle, and the same lowered to ort-cpu."""

    def get(family: str) -> tuple[Bundle, Bundle]:
        _, portable = recurrent_bundle(family, tmp_path_factory)
        if family not in _made:
            output = tmp_path_factory.mktemp("lowered") / family
            _made[family] = lower(Options(bundle=portable.path, output=output, target="ort-cpu"))
        return portable, _made[family]

    return get


def test_new_tokens_come_first_in_a_right_padded_row(tmp_path: Path) -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["": 23, "headport": 1]>
        g (int64[batch, sequence] input_ids, int64[batch, total_sequence] attention_mask)
            => (int64[batch, sequence] new_tokens)
        { new_tokens = headport.NewTokens (attention_mask, input_ids) }
    """)
    add_step_inputs(model)
    lower_states(model)
    common_passes.RemoveUnusedNodesPass()(model)
    ir.save(model, tmp_path / "m.onnx")
    feeds = {
        "input_ids": np.zeros((3, 3), np.int64),
        "attention_mask": np.zeros((3, 0), np.int64),
        "seqlens_k": np.array([4, 0, 2], np.int32),
        "query_seqlens": np.array([3, 1, 0], np.int32),
        "total_sequence_length": np.array(9, np.int32),
    }
    found = open_session(tmp_path / "m.onnx", {}).run(feeds)["new_tokens"]
    assert found.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]


def steps(runner: Runner) -> list[np.ndarray]:
    """Ragged prompts, then single tokens while one row is idle at times."""
    rng, found = np.random.default_rng(2), []
    cache = runner.new_cache(3, 24)
    for new in ((9, 0, 4), (1, 5, 3), (1, 1, 0), (1, 0, 1), (1, 1, 1)):
        ids = rng.integers(1, VOCAB_SIZE, (3, max(new)))
        hidden = runner.forward(cache, ids, np.array(new))
        found += [hidden[b, :n] for b, n in enumerate(new)]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_lowered_answers_like_portable(family: str, lowered: Lowered) -> None:
    portable, bundle = lowered(family)
    expected, found = (np.concatenate(steps(open_runner(b))) for b in (portable, bundle))
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())
    report = bundle.manifest.provenance.stages[-1].report
    kept = [line for line in report["portable"] if "runs its definition" in line]
    assert any(line.startswith("layer 0: CausalConvolution_") for line in kept)
    attention = sum("GroupQueryAttention" in line for line in report["lowered"])
    assert attention == (family in ("lfm2", "qwen3_5"))


@pytest.mark.parametrize("family", ["lfm2", "mamba"])
def test_generation_is_the_same_on_both(family: str, lowered: Lowered) -> None:
    prompts = ["The", "A longer prompt."]
    texts = [
        [reply.token_ids for reply in Generator(b).generate(prompts, max_new_tokens=8)]
        for b in lowered(family)
    ]
    assert texts[0] == texts[1] and all(texts[0])


def test_states_are_read_and_written_in_turn_and_keys_in_place(lowered: Lowered) -> None:
    runner = open_runner(lowered("lfm2")[1])
    cache = runner.new_cache(1, 4)
    first, second = cache.sets  # type: ignore[attr-defined]
    assert first["past_key_values.1.key"] is second["past_key_values.1.key"]
    assert first["past_conv_states.0"] is not second["past_conv_states.0"]
    for at, turn in ((0, 1), (1, 0), (2, 1)):
        runner.forward(cache, np.array([[7 + at]]), np.array([1]))
        assert cache.turn == turn  # type: ignore[attr-defined]
    assert np.abs(first["past_conv_states.0"] - second["past_conv_states.0"]).max() > 0


@pytest.mark.parametrize("family", ["lfm2", "mamba"])
def test_states_go_with_their_row(family: str, lowered: Lowered) -> None:
    ids = np.random.default_rng(4).integers(1, VOCAB_SIZE, (2, 8))
    for bundle in lowered(family):
        runner = open_runner(bundle)
        whole = runner.forward(runner.new_cache(1, 8), ids[:1], np.array([8]))[0, 6:]
        cache = runner.new_cache(2, 8)
        runner.forward(cache, ids[:, :5], np.array([5, 3]))
        runner.forward(cache, ids[:, 5:6], np.array([1, 1]))  # the other set of states
        runner.reorder(cache, np.array([1, 0]))
        found = runner.forward(cache, ids[[1, 0], 6:], np.array([2, 2]))[1]
        np.testing.assert_allclose(found, whole, atol=2e-4 * np.abs(whole).max())


def test_an_idle_row_keeps_its_states_bit_for_bit(lowered: Lowered) -> None:
    runner = open_runner(lowered("mamba2")[1])
    cache = runner.new_cache(2, 8)
    runner.forward(cache, np.array([[3, 4], [5, 6]]), np.array([2, 2]))
    before = {n: a.copy() for n, a in cache.buffers.items()}  # type: ignore[attr-defined]
    runner.forward(cache, np.array([[7], [8]]), np.array([1, 0]))
    after = cache.buffers  # type: ignore[attr-defined]
    for name, state in before.items():
        np.testing.assert_array_equal(after[name][1], state[1])
        assert (after[name][0] != state[0]).any()
