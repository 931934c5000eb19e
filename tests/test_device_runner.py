"""The runner of `ort-cuda`, on the CPU provider: every kind of step against rows run alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.device_runner import DeviceRunner
from headport.errors import PromptError, UsageError
from headport.lowering import Options, lower
from headport.runner import PortableRunner, open_runner
from headport.session import Binding, SessionSettings
from tests.lowering.backbones import CONTEXT, HIDDEN, VOCAB, Layer, attention_backbone
from tests.toy_bundles import write_toy

CPU = SessionSettings(provider="cpu")
IDS = np.random.default_rng(0).integers(0, VOCAB, (3, CONTEXT))
TOLERANCE = 2e-2  # float16, hidden states of about 3


def _bundle(folder: Path, *layers: Layer, half: bool = True) -> Path:
    kind = np.float16 if half else np.float32
    weight = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(kind)
    backbone = attention_backbone(layers, half=half)
    source = write_toy(folder / "a", weight, backbone=backbone, max_context=CONTEXT)
    return lower(Options(bundle=source.path, output=folder / "b", target="ort-cuda")).path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _bundle(tmp_path_factory.mktemp("device"), Layer(window=5), Layer(slopes=True))


@pytest.fixture(scope="module")
def runner(bundle: Path) -> DeviceRunner:
    found = open_runner(Bundle.open(bundle), CPU)
    assert isinstance(found, DeviceRunner)
    return found


def _alone(runner: DeviceRunner, row: int, length: int) -> np.ndarray:
    cache = runner.new_cache(1, length)
    return runner.forward(cache, IDS[row : row + 1, :length], np.array([length]))[0]


def _run(
    runner: DeviceRunner, capacity: int, steps: list[tuple[int, ...]], spoil: bool = False
) -> list[np.ndarray]:
    """Rows' hidden states of these steps; `spoil` fills the caches with NaN first."""
    cache = runner.new_cache(len(steps[0]), capacity)
    if spoil:
        for buffer in cache.buffers.values():
            buffer.fill(np.full(buffer.shape, np.nan, buffer.dtype))
    found: list[list[np.ndarray]] = [[] for _ in steps[0]]
    for step in steps:
        given = np.array(step)
        ids = np.full((len(step), max(1, given.max())), VOCAB - 1)
        for row, new in enumerate(step):
            start = int(cache.lengths[row])
            ids[row, :new] = IDS[row, start : start + new]
        hidden = runner.forward(cache, ids, given)
        assert hidden.shape == (*ids.shape, HIDDEN) and hidden.dtype == np.float32
        for row, new in enumerate(step):
            found[row].append(hidden[row, :new])
    return [np.concatenate(parts) for parts in found]


@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize(
    "steps",
    [
        [(9, 2, 5), (1, 1, 1), (1, 0, 1), (0, 1, 1)],  # ragged prompt, decode with rows that wait
        [(1, 1, 1), (1, 1, 1)],  # decode from nothing
        [(4, 0, 7), (3, 6, 0), (1, 1, 1)],  # chunks behind others, and a row that starts late
        [(0, 3, 0), (1, 0, 1)],  # a row that starts with a single token
        [(12, 12, 1), (0, 0, 11)],  # full rows, and padding over the end of the cache
        [(0, 0, 0), (2, 2, 2), (0, 0, 0)],  # steps without a token
    ],
    ids=str,
)
def test_every_kind_of_step(
    runner: DeviceRunner, steps: list[tuple[int, ...]], spoil: bool
) -> None:
    totals = [sum(row) for row in zip(*steps, strict=True)]
    for row, hidden in enumerate(_run(runner, max(totals), steps, spoil)):
        expected = _alone(runner, row, totals[row]) if totals[row] else hidden
        assert np.abs(hidden - expected).max(initial=0.0) < TOLERANCE


def test_a_full_row_may_wait_while_others_decode(runner: DeviceRunner) -> None:
    # Its token is written behind the last one kept, which must not be another row's slot.
    found = _run(runner, CONTEXT, [(CONTEXT, 3, 1), (0, 1, 1), (0, 1, 1)])
    for row, length in enumerate((CONTEXT, 5, 3)):
        assert np.abs(found[row] - _alone(runner, row, length)).max() < TOLERANCE


def test_rows_take_over_what_others_held(runner: DeviceRunner) -> None:
    cache = runner.new_cache(3, CONTEXT)
    runner.forward(cache, IDS[:, :9], np.array([9, 2, 5]))
    runner.reorder(cache, np.array([2, 0, 0]))
    assert cache.lengths.tolist() == [5, 9, 9]
    following = np.array([[IDS[2, 5]], [IDS[0, 9]], [IDS[0, 9]]])
    found = runner.forward(cache, following, np.ones(3, np.int64))
    for row, (source, length) in enumerate([(2, 6), (0, 10), (0, 10)]):
        assert np.abs(found[row, 0] - _alone(runner, source, length)[-1]).max() < TOLERANCE


def test_runs_per_step(runner: DeviceRunner) -> None:
    counts = []
    cache = runner.new_cache(3, CONTEXT)
    for step in ((9, 2, 5), (1, 0, 1), (2, 0, 3), (0, 0, 0)):
        before = runner.runs
        ids = IDS[:, : max(1, *step)]
        runner.forward(cache, ids, np.array(step))
        counts.append(runner.runs - before)
    assert counts == [1, 1, 2, 0]


def test_decoding_binds_once(runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = Binding.input
    monkeypatch.setattr(
        Binding,
        "input",
        lambda self, name, buffer: (calls.append(name), original(self, name, buffer)),
    )
    cache = runner.new_cache(2, CONTEXT)
    runner.forward(cache, IDS[:2, :3], np.array([3, 1]))
    runner.forward(cache, IDS[:2, :1], np.array([1, 1]))
    bound = len(calls)
    for _ in range(5):
        runner.forward(cache, IDS[:2, :1], np.array([1, 0]))
    assert len(calls) == bound


def test_a_cache_that_is_full_takes_no_more(runner: DeviceRunner) -> None:
    cache = runner.new_cache(2, 4)
    runner.forward(cache, IDS[:2, :4], np.array([4, 2]))
    with pytest.raises(PromptError, match="row 0 would hold 5 tokens"):
        runner.forward(cache, IDS[:2, :1], np.array([1, 1]))


def test_float32_keeps_growing_caches(tmp_path: Path) -> None:
    found = Bundle.open(_bundle(tmp_path, Layer(), half=False))
    assert isinstance(open_runner(found, CPU), PortableRunner)
    report = found.manifest.provenance.stages[-1].report
    assert report["portable"][0].startswith("attention layer 0: CachedAttention (no CUDA kernel")


def test_no_gpu_is_said_and_nothing_runs_on_the_cpu(bundle: Path) -> None:
    with pytest.raises(UsageError, match=r"CUDAExecutionProvider (is not in|needs a GPU)"):
        open_runner(Bundle.open(bundle))


def test_a_cpu_bundle_is_not_for_a_gpu(tmp_path: Path) -> None:
    weight = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    source = write_toy(tmp_path / "a", weight)
    found = lower(Options(bundle=source.path, output=tmp_path / "b", target="ort-cpu"))
    with pytest.raises(UsageError, match=r"lowered to ort-cpu, which CUDAExecution.* cannot run"):
        open_runner(found, SessionSettings(provider="cuda"))


def test_slots_answer_as_rows_alone(runner: DeviceRunner) -> None:
    slots = runner.new_slots(3, CONTEXT)
    assert slots.divisible and not slots.movable and slots.nbytes > 0
    found: dict[int, list[np.ndarray]] = {1: [], 2: []}

    def feed(rows: dict[int, int]) -> None:
        held, width = slots.lengths.copy(), max(rows.values())
        ids = np.zeros((len(rows), width), np.int64)
        for n, (row, new) in enumerate(rows.items()):
            ids[n, :new] = IDS[row, held[row] : held[row] + new]
        hidden = slots.forward(list(rows), ids, np.array(list(rows.values())))
        for n, (row, new) in enumerate(rows.items()):
            found[row].append(hidden[n, :new])

    for step in ({1: 5}, {1: 1}, {2: 3}, {1: 1, 2: 1}, {1: 2, 2: 3}, {2: 1}):
        feed(step)
    assert slots.lengths.tolist() == [0, 9, 8]
    for row, parts in found.items():
        states = np.concatenate(parts)
        np.testing.assert_allclose(states, _alone(runner, row, len(states)), atol=TOLERANCE)
    slots.cut(1, 3)
    found[1].clear()
    feed({1: 4})
    np.testing.assert_allclose(found[1][0], _alone(runner, 1, 7)[3:], atol=TOLERANCE)
