"""Runners: both targets give a row's answer whatever the batch, the chunks or the padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headport import cache_ports
from headport.bundle import Bundle
from headport.errors import BundleError, PromptError
from headport.runner import InPlaceRunner, Runner, open_runner
from headport.session import Binding

IDS = np.random.default_rng(0).integers(0, 257, (3, 40))


@pytest.fixture(params=["tiny_bundle", "tiny_lowered"], scope="module")
def runner(request: pytest.FixtureRequest) -> Runner:
    return open_runner(Bundle.open(request.getfixturevalue(request.param)))


@pytest.fixture(scope="module")
def in_place(tiny_lowered: Path) -> InPlaceRunner:
    found = open_runner(Bundle.open(tiny_lowered))
    assert isinstance(found, InPlaceRunner)
    return found


def _alone(runner: Runner, row: int, count: int) -> np.ndarray:
    cache = runner.new_cache(1, count)
    return runner.forward(cache, IDS[row : row + 1, :count], np.array([count]))[0]


def _run(runner: Runner, capacity: int, steps: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Hidden states per row when rows advance by these numbers of tokens."""
    rows = len(steps[0])
    cache, seen = runner.new_cache(rows, capacity), np.zeros(rows, np.int64)
    found: list[list[np.ndarray]] = [[] for _ in range(rows)]
    for step in steps:
        ids = np.full((rows, max(*step, 1)), -1)  # whatever stands behind a row is not read
        for b, n in enumerate(step):
            ids[b, :n] = IDS[b, seen[b] : seen[b] + n]
        hidden = runner.forward(cache, ids, np.array(step))
        for b, n in enumerate(step):
            found[b].append(hidden[b, :n])
        seen = seen + step
        assert cache.lengths.tolist() == seen.tolist()
    return [np.concatenate(parts) for parts in found]


@pytest.mark.parametrize(
    "steps",
    [
        [(9, 2, 5)],
        [(4, 2, 5), (5, 0, 0)],
        [(1, 1, 1)] * 3,
        [(3, 0, 1), (0, 2, 1), (0, 0, 1), (6, 0, 2)],
        [(0, 0, 4), (9, 2, 0)],
    ],
)
def test_rows_answer_as_if_alone(runner: Runner, steps: list[tuple[int, ...]]) -> None:
    found = _run(runner, 10, steps)
    for b, rows in enumerate(found):
        assert np.abs(rows - _alone(runner, b, len(rows))).max(initial=0) < 2e-5


def test_a_row_may_fill_the_cache_exactly(runner: Runner) -> None:
    # The last chunk's padding would end behind the first row's last slot.
    found = _run(runner, 12, [(11, 1, 1), (1, 9, 2), (0, 2, 9)])
    for b, rows in enumerate(found):
        assert len(rows) == 12 and np.abs(rows - _alone(runner, b, 12)).max() < 2e-5


def test_rows_take_over_what_others_held(runner: Runner) -> None:
    cache = runner.new_cache(3, 12)
    runner.forward(cache, IDS[:, :9], np.array([9, 2, 5]))
    runner.reorder(cache, np.array([2, 0, 2]))
    assert cache.lengths.tolist() == [5, 9, 5]
    sources = [2, 0, 2]
    following = np.array([IDS[2, 5:7], IDS[0, 9:11], [IDS[2, 5], 7]])
    found = runner.forward(cache, following, np.array([2, 2, 2]))
    for b, source in enumerate(sources[:2]):
        length = [5, 9][b] + 2
        assert np.abs(found[b] - _alone(runner, source, length)[-2:]).max() < 2e-5
    assert np.abs(found[2, 0] - found[0, 0]).max() < 2e-5
    assert np.abs(found[2, 1] - found[0, 1]).max() > 1e-3  # the copies are two


def test_one_token_more_than_fits_is_refused_and_changes_nothing(runner: Runner) -> None:
    cache = runner.new_cache(2, 5)
    runner.forward(cache, IDS[:2, :5], np.array([5, 2]))
    runs = runner.runs
    with pytest.raises(PromptError, match=r"row 0 would hold 6 tokens, but .* opened for 5"):
        runner.forward(cache, IDS[:2, :1], np.array([1, 1]))
    assert cache.lengths.tolist() == [5, 2] and runner.runs == runs
    last = runner.forward(cache, IDS[:2, 2:5], np.array([0, 3]))[1, :3]
    assert np.abs(last - _alone(runner, 1, 5)[2:]).max() < 2e-5


def test_both_targets_agree(tiny_bundle: Path, tiny_lowered: Path) -> None:
    found = []
    for path in (tiny_bundle, tiny_lowered):
        each = open_runner(Bundle.open(path))
        hidden = np.concatenate(_run(each, 20, [(9, 2, 5), (1, 1, 0), (0, 1, 1)]))
        found.append((hidden, each.head(hidden).logits))
    for a, b in zip(*found, strict=True):
        assert np.abs(a - b).max() < 1e-4 * np.abs(a).max()


def test_one_run_per_step(runner: Runner) -> None:
    cache = runner.new_cache(3, 20)
    before = runner.runs
    runner.forward(cache, IDS[:, :9], np.array([9, 2, 5]))
    for _ in range(4):
        runner.forward(cache, IDS[:, :1], np.array([1, 0, 1]))
    assert runner.runs - before == 5


def test_caches_are_written_in_place(in_place: InPlaceRunner) -> None:
    cache = in_place.new_cache(2, 10)
    addresses = {name: b.ctypes.data for name, b in cache.buffers.items()}
    for buffer in cache.buffers.values():
        buffer[:] = np.nan  # a slot that is read before it is written would show
    hidden = in_place.forward(cache, IDS[:2, :4], np.array([4, 2]))
    assert np.isfinite(hidden[0]).all() and np.isfinite(hidden[1, :2]).all()
    step = in_place.forward(cache, IDS[:2, :1], np.array([1, 0]))
    assert np.isfinite(step[0]).all()
    for name, buffer in cache.buffers.items():
        assert buffer.ctypes.data == addresses[name]
        filled = np.isfinite(buffer).all(axis=(1, 3))  # [batch, slots]
        assert filled.sum(axis=1).tolist() == [5, 2] and filled[0, :5].all() and filled[1, :2].all()


def test_hidden_states_belong_to_the_caller(runner: Runner) -> None:
    cache = runner.new_cache(1, 5)
    first = runner.forward(cache, IDS[:1, :1], np.array([1]))
    kept = first.copy()
    runner.forward(cache, IDS[:1, 1:2], np.array([1]))
    assert (first == kept).all()


def test_decoding_binds_once(in_place: InPlaceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for method in ("input", "output"):
        original = getattr(Binding, method)

        def counted(self: Any, name: str, buffer: Any, original: Any = original) -> None:
            calls.append(name)
            original(self, name, buffer)

        monkeypatch.setattr(Binding, method, counted)
    cache = in_place.new_cache(2, 30)
    in_place.forward(cache, IDS[:2, :7], np.array([7, 3]))
    in_place.forward(cache, IDS[:2, :1], np.array([1, 1]))
    first = len(calls)
    assert first == 2 * (4 + 1 + 2 * len(cache.buffers))  # one prompt, one decode binding
    for _ in range(10):
        in_place.forward(cache, IDS[:2, :1], np.array([1, 1]))
    assert len(calls) == first


def test_chunks_are_cut_where_a_long_row_leaves_no_room(
    in_place: InPlaceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_ports, "SPARE_SLOTS", 3)
    before = in_place.runs
    found = _run(in_place, 12, [(12, 1, 1), (0, 11, 5)])
    assert in_place.runs - before == 1 + 4  # 11 columns, 3 at a time
    for b, rows in enumerate(found):
        assert np.abs(rows - _alone(in_place, b, len(rows))).max() < 2e-5


def test_a_failed_run_leaves_the_cache_as_it_was(runner: Runner) -> None:
    cache = runner.new_cache(1, 20)
    runner.forward(cache, IDS[:1, :4], np.array([4]))
    with pytest.raises(Exception, match="out of data bounds"):
        runner.forward(cache, np.array([[99_999]]), np.array([1]))
    assert cache.lengths.tolist() == [4]
    rest = runner.forward(cache, IDS[:1, 4:9], np.array([5]))[0]
    assert np.abs(rest - _alone(runner, 0, 9)[4:]).max() < 2e-5


def test_head_takes_any_layout(runner: Runner) -> None:
    hidden = _alone(runner, 0, 9)
    expected = runner.head(hidden).logits
    assert expected.shape == (9, 257) and expected.dtype == np.float32
    strided = np.repeat(hidden, 2, axis=0)[::2]
    assert np.abs(runner.head(strided).logits - expected).max() < 1e-5
    with pytest.raises(BundleError, match="no head 'value' is loaded \\(loaded: lm\\)"):
        runner.head(hidden, "value")


def test_graphs_must_have_the_manifests_inputs(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    graph = bundle.manifest.graphs["backbone"]
    port = msgspec.structs.replace(graph.inputs[0], name="tokens")
    graphs = {
        **bundle.manifest.graphs,
        "backbone": msgspec.structs.replace(graph, inputs=(port, *graph.inputs[1:])),
    }
    odd = Bundle(bundle.path, msgspec.structs.replace(bundle.manifest, graphs=graphs))
    with pytest.raises(BundleError, match=r"not those of the manifest .*input_ids, tokens"):
        open_runner(odd)


def test_unknown_targets_are_refused(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    odd = msgspec.structs.replace(bundle.manifest, target="tpu")
    with pytest.raises(BundleError, match="no runner for target 'tpu'"):
        open_runner(Bundle(bundle.path, odd))


def test_a_step_of_one_of_several_rows_looks_at_no_cache(
    in_place: InPlaceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time in Python may not grow with the number of layers."""
    expected, slots = _alone(in_place, 0, 5)[4:], in_place.new_slots(4, 8)
    slots.forward([1], IDS[:1, :3], np.array([3]))
    slots.forward([1], IDS[:1, 3:4], np.array([1]))
    monkeypatch.setattr("headport.runner.is_state", None)
    found = slots.forward([1], IDS[:1, 4:5], np.array([1]))
    np.testing.assert_allclose(found[0], expected, atol=1e-5)
