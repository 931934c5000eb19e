"""Recurrent models as exported: each row answers like the row alone, however it is fed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from headport.bundle import Bundle
from headport.errors import ExportError, ParityError
from headport.export import functions, recurrent
from headport.export.command import Options, export
from headport.export.recurrent import one_recurrence
from headport.export.recurrent_cache import RecurrentCache
from headport.export.recurrent_functions import CONVOLUTION, NEW_TOKENS
from headport.export.scan_functions import DELTA_RULE, DUAL_SCAN, SELECTIVE_SCAN
from headport.export.states import StateShape
from headport.graphs import load_graphs, write_graphs
from headport.inspection import describe
from headport.runner import Runner, open_runner
from headport.selftest import run_selftest
from tests.conftest import VOCAB_SIZE, save_model
from tests.recurrent_models import BASE, RECURRENT, recurrent_bundle, save_recurrent

Float32 = npt.NDArray[np.float32]
Exported = Callable[[str], tuple[Path, Bundle]]
LENGTHS = np.array([9, 2, 5])  # prompts; the last row then skips a step
STEPS = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1]])


@pytest.fixture
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return lambda name: recurrent_bundle(name, tmp_path_factory)


def rows() -> list[npt.NDArray[np.int64]]:
    rng = np.random.default_rng(17)
    return [rng.integers(1, VOCAB_SIZE, n) for n in LENGTHS + STEPS.sum(axis=0)]


def alone(runner: Runner) -> list[Float32]:
    found = []
    for row in rows():
        cache = runner.new_cache(1, len(row))
        found.append(runner.forward(cache, row[None], np.array([len(row)]))[0])
    return found


def together(runner: Runner) -> list[Float32]:
    # Right-padded prompts, then steps in which one row may be idle.
    ids, seen = rows(), np.zeros(len(LENGTHS), np.int64)
    cache = runner.new_cache(len(ids), max(map(len, ids)))
    found: list[list[Float32]] = [[] for _ in ids]
    for new in (LENGTHS, *STEPS):
        width = int(new.max())
        step = np.zeros((len(ids), width), np.int64)
        for b, n in enumerate(new):
            step[b, :n] = ids[b][seen[b] : seen[b] + n]
        states = runner.forward(cache, step, new)
        for b, n in enumerate(new):
            found[b].append(states[b, :n])
        seen = seen + new
    return [np.concatenate(parts) for parts in found]


def error(found: Sequence[Float32], expected: Sequence[Float32]) -> float:
    largest = max(float(np.abs(e).max()) for e in expected)
    return max(float(np.abs(f - e).max()) for f, e in zip(found, expected, strict=True)) / largest


@pytest.mark.parametrize("family", RECURRENT)
def test_a_row_answers_like_pytorch_and_like_the_row_alone(family: str, exported: Exported) -> None:
    checkpoint, bundle = exported(family)
    runner = open_runner(bundle)
    expected = alone(runner)
    assert error(together(runner), expected) < 1e-4
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        wanted = [model(input_ids=torch.from_numpy(row)[None]).logits[0].numpy() for row in rows()]
    logits = [runner.head(hidden).logits for hidden in expected]
    assert error([found for found in logits if found is not None], wanted) < 2e-4
    assert run_selftest(bundle)
    assert f"{bundle.manifest.model.layers} layers" in describe(bundle).text()


def test_ports_say_what_each_layer_keeps(exported: Exported) -> None:
    shapes = {
        family: {
            p.name: p.shape for p in exported(family)[1].manifest.graphs["backbone"].inputs[2:]
        }
        for family in ("lfm2", "mamba", "qwen3_5")
    }
    keys = ("batch", 2, "past_sequence", 8)
    assert shapes["lfm2"] == {  # layer 0 convolves, layer 1 attends
        "past_key_values.1.key": keys,
        "past_key_values.1.value": keys,
        "past_conv_states.0": ("batch", 32, 2),
    }
    assert shapes["mamba"]["past_conv_states.1"] == ("batch", 64, 3)
    assert shapes["mamba"]["past_recurrent_states.1"] == ("batch", 64, 8)
    assert list(shapes["qwen3_5"]) == [
        "past_key_values.1.key",
        "past_key_values.1.value",
        "past_conv_states.0",
        "past_recurrent_states.0",
    ]
    mamba = exported("mamba")[1].manifest.model
    assert (mamba.layers, mamba.max_context) == (2, 1 << 20)  # its states do not grow


def test_half_precision_keeps_recurrent_states_in_float32(tmp_path: Path) -> None:
    checkpoint = save_recurrent("mamba", tmp_path, num_hidden_layers=1)
    bundle = export(Options(model=str(checkpoint), output=tmp_path / "bundle", dtype="fp16"))
    kinds = {p.name: p.dtype for p in bundle.manifest.graphs["backbone"].inputs[2:]}
    assert kinds == {"past_conv_states.0": "float16", "past_recurrent_states.0": "float"}


# What is damaged: family, function, what its body says, what it says instead.
FAULTS = {
    "padding counts as tokens": (
        "lfm2",
        NEW_TOKENS,
        "new_tokens = Slice (attention_mask, P, S, axis)",
        "cut = Slice (attention_mask, P, S, axis)\n  none = Sub (cut, cut)\n"
        "  new_tokens = Add (none, axis)",
    ),
    "the state keeps padding": (
        "lfm2",
        CONVOLUTION,
        "recent = Add (count, offsets)",
        "none = Sub (count, count)\n  every = Add (none, T)\n  recent = Add (every, offsets)",
    ),
    "padding moves the scan": (
        "mamba",
        SELECTIVE_SCAN,
        "dt_valid = Where (flag_column, dt_float, none)",
        "dt_valid = Identity (dt_float)",
    ),
    "padding moves the dual scan": (
        "mamba2",
        DUAL_SCAN,
        "dt_valid = Where (flag_column, dt_float, none)",
        "dt_valid = Identity (dt_float)",
    ),
    "the dual scan forgets": (
        "mamba2",
        DUAL_SCAN,
        "h_next = Add (h_kept, h_new)",
        "h_next = Identity (h_new)",
    ),
    "padding is learned by the delta rule": (
        "qwen3_5",
        DELTA_RULE,
        "beta_valid = Where (flag_column, beta_float, none)",
        "beta_valid = Identity (beta_float)",
    ),
}


def damage(monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str) -> None:
    sound = functions.recurrent_text

    def text(wanted: str) -> tuple[str, str] | None:
        found = sound(wanted)
        if found is None or not wanted.startswith(name):
            return found
        assert old in found[1]
        return found[0], found[1].replace(old, new)

    monkeypatch.setattr(functions, "recurrent_text", text)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_make_a_row_answer_otherwise(
    fault: str, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, *change = FAULTS[fault]
    _, bundle = exported(family)
    damage(monkeypatch, *change)
    graphs = load_graphs(bundle)
    functions.define_functions(graphs["backbone"])
    write_graphs(graphs, {n: g.file for n, g in bundle.manifest.graphs.items()}, tmp_path)
    runner = open_runner(Bundle(tmp_path, bundle.manifest))
    assert error(together(runner), alone(open_runner(bundle))) > 1e-3


def test_a_fault_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch, *FAULTS["the state keeps padding"][1:])
    checkpoint = save_recurrent("lfm2", tmp_path)
    with pytest.raises(ParityError, match="do not answer like the checkpoint"):
        export(Options(model=str(checkpoint), output=tmp_path / "bundle"))
    assert [p.name for p in tmp_path.iterdir()] == ["lfm2"]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "xlstm": (
        "xLSTMConfig",
        BASE | {"hidden_size": 64, "num_hidden_layers": 1, "num_heads": 2},
        "xLSTMForCausalLM.*a cache of its own",
    ),
    "rwkv": (
        "RwkvConfig",
        BASE | {"num_hidden_layers": 2, "attention_hidden_size": 32},
        "RwkvForCausalLM.*lists of its own",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_keeps_its_states_elsewhere_is_refused(family: str, tmp_path: Path) -> None:
    kind, settings, reason = REFUSED[family]
    checkpoint = save_model(tmp_path / family, getattr(transformers, kind)(**settings))
    with pytest.raises(ExportError, match=reason):
        export(Options(model=str(checkpoint), output=tmp_path / "bundle"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [family]


def cache_of(*states: StateShape) -> RecurrentCache:
    ids = torch.zeros((1, 3), dtype=torch.int64)
    past = [s.zeros(1, torch.float32) for s in states]
    return RecurrentCache([], [], ids, layers=[], states=states, past_states=past, input_ids=ids)


def test_a_state_that_no_operator_computed_is_refused() -> None:
    cache = cache_of(StateShape(4, "recurrent", (2, 3)))
    with pytest.raises(ExportError, match="layer 4 computes its recurrent state by itself"):
        cache.update_recurrent_state(torch.zeros(1, 2, 3), 4)
    assert cache.missing() == ["present_recurrent_states.4"]


def test_a_state_is_taken_by_the_layer_that_declared_it() -> None:
    cache = cache_of(StateShape(4, "conv", (2, 3)))
    with pytest.raises(ExportError, match="was not expected"):
        cache.take("conv")  # before any mixer runs
    cache.get_conv_state(4)
    assert cache.take("conv")[0].layer == 4
    with pytest.raises(ExportError, match="recurrent state of layer 4 was not expected"):
        cache.take("recurrent")


def test_other_values_than_the_state_keeps_are_not_convolved() -> None:
    cache = cache_of(StateShape(0, "conv", (2, 3)))
    cache.update_conv_state(torch.zeros(1, 2, 3), 0)
    with pytest.raises(ExportError, match="other values than its state keeps"):
        recurrent.convolve(cache, torch.zeros(1, 2, 3), torch.zeros(2, 4))


def test_a_scan_per_head_of_a_shared_state_is_refused() -> None:
    cache = cache_of(StateShape(0, "recurrent", (2, 4, 3)))  # as Zamba keeps it
    cache.get_recurrent_state(0)
    x, A, B = torch.zeros(1, 3, 4), torch.zeros(4, 3), torch.zeros(1, 3, 3)
    with pytest.raises(ExportError, match="layer 0 keeps a state of"):
        recurrent.emit_scan(cache, SELECTIVE_SCAN, (x, x, A, B, B), x.shape)


def test_transformers_functions_are_put_back() -> None:
    from transformers.models.mamba import modeling_mamba as own

    config = transformers.MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)
    model, before = transformers.MambaForCausalLM(config), own.mamba_selective_scan
    active: ContextVar[Any] = ContextVar("active", default=None)
    with pytest.raises(KeyError), one_recurrence(model, active):
        assert own.mamba_selective_scan is not before
        with pytest.raises(ExportError, match="cache holds no states"):
            own.causal_conv1d_fn()
        raise KeyError
    assert own.mamba_selective_scan is before
