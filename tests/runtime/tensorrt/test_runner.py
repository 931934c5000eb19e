"""The runner of plans, on a stand-in for the library and with main memory as the device."""

from __future__ import annotations

import ctypes
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import headport.runtime.tensorrt.runner as runner_module
from headport.bundle import Bundle
from headport.engines import bundle_digest, read_engines
from headport.errors import BundleError, EngineError, NoGpuError, PromptError
from headport.gpu_probe import Gpu, GpuProbe
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.runner import open_runner
from headport.runtime.engine.backends import load_backend
from headport.runtime.engine.builder import build_plan
from headport.runtime.engine.command import Options, engine
from headport.runtime.tensorrt.guard import require_usable
from headport.runtime.tensorrt.plan import Plan
from headport.runtime.tensorrt.runner import PlanRunner, open_plans
from headport.selftest import run_selftest
from tests.lowering.backbones import CONTEXT, HIDDEN, VOCAB, Layer, attention_backbone
from tests.runtime.engine.standing_in import standing_in
from tests.toy_bundles import write_toy

PROFILE = (
    *("prefill", "batch=1:2:4", "sequence=2:4:6", "past=0:8:31"),
    *("decode", "batch=1:2:4", "sequence=1", "past=0:8:31"),
)
CARD = GpuProbe("13.0", (Gpu("card", "8.9", 1 << 34),), None)


class HostDevice:
    """Main memory in place of a GPU's."""

    stream = 7

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}

    def allocate(self, size: int) -> int:
        block = (ctypes.c_uint8 * size)()
        address = ctypes.addressof(block)
        self.held[address] = block
        return address

    def free(self, address: int) -> None:
        del self.held[address]

    def upload(self, address: int, array: np.ndarray) -> None:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, address: int, array: np.ndarray) -> None:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    weight = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(np.float16)
    backbone = attention_backbone([Layer(window=5), Layer()], half=True)
    source = write_toy(folder / "a", weight, backbone=backbone, max_context=CONTEXT)
    output = folder / "lowered"
    return lower(LowerOptions(bundle=source.path, output=output, target="tensorrt")).path


@pytest.fixture(scope="module")
def built(lowered: Path) -> Path:
    return plans_of(lowered, lowered.with_name("built"), PROFILE)


def plans_of(lowered: Path, output: Path, profile: tuple[str, ...]) -> Path:
    with standing_in(), pytest.MonkeyPatch.context() as patch:
        options = Options(
            bundle=lowered,
            output=output,
            backend="tensorrt-rtx",
            profile=profile,
            compute_capability=("SM89",),
        )
        patch.setattr(
            "headport.runtime.engine.plan.build_apart",
            lambda request, *_, **__: build_plan(load_backend(request.backend), request),
        )
        made = engine(options).path
    # The stand-in's plans name the graphs they were built of, which lay in the draft.
    for name in ("backbone", "head.lm"):
        plan = made / "engines" / f"{name}.plan"
        head, rest = plan.read_bytes().split(b"\n", 1)
        graph = str(lowered / f"{name}.onnx").encode()
        start = head.index(b'"model": "') + len(b'"model": "')
        plan.write_bytes(head[:start] + graph + head[head.index(b'"', start) :] + b"\n" + rest)
    return made


def opened(built: Path, device: HostDevice, **options: Any) -> PlanRunner:
    trt = _library()
    bundle = Bundle(built, _manifest(built))
    return PlanRunner(
        bundle,
        device,
        read_engines(bundle),
        lambda record: Plan(trt, built / record.plan, device, **options),
    )


def _manifest(built: Path) -> Any:
    from headport.manifest import decode_manifest

    return decode_manifest((built / "manifest.json").read_bytes(), "manifest")


def test_plans_answer_like_the_graphs_step_by_step(built: Path) -> None:
    device = HostDevice()
    found = opened(built, device)
    expected = open_runner(Bundle(built, _manifest(built)))
    caches = [runner.new_cache(3, CONTEXT) for runner in (found, expected)]
    rng = np.random.default_rng(0)
    for lengths in ((9, 3, 1), (1, 1, 1), (1, 0, 1), (4, 0, 2)):
        counts = np.array(lengths)
        ids = rng.integers(0, VOCAB, (3, max(lengths)))
        hidden = [
            runner.forward(cache, ids, counts)
            for runner, cache in zip((found, expected), caches, strict=True)
        ]
        for row, count in enumerate(lengths):
            np.testing.assert_allclose(
                hidden[0][row, :count], hidden[1][row, :count], rtol=0, atol=2e-2
            )
    assert found.runs == 5  # the first step is wider than a plan takes at once
    rows = hidden[1].reshape(-1, HIDDEN)
    logits = [runner.head(rows).logits for runner in (found, expected)]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-6)
    assert found.full_logits(rows[:0]).shape == (0, VOCAB)
    del caches, hidden, logits, found
    assert not device.held  # all memory is given back


def test_a_prompt_is_cut_where_the_profile_of_prompts_ends(lowered: Path, tmp_path: Path) -> None:
    profile = (
        *("prefill", "batch=1", "sequence=1:4:6", "past=0"),
        *("decode", "batch=1", "sequence=1", "past=0:8:31"),
    )
    made = plans_of(lowered, tmp_path / "built", profile)
    found, expected = opened(made, HostDevice()), open_runner(Bundle(made, _manifest(made)))
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, 9))
    hidden = [
        runner.forward(runner.new_cache(1, CONTEXT), ids, np.array([9]))
        for runner in (found, expected)
    ]
    np.testing.assert_allclose(hidden[0], hidden[1], rtol=0, atol=2e-2)
    assert found.runs == 1 + 3  # six tokens, and three one by one


def test_plans_pass_the_selftest_of_their_bundle(built: Path) -> None:
    bundle = Bundle(built, _manifest(built))
    assert run_selftest(bundle, runner=opened(built, HostDevice()))


def test_limits_of_a_plan_are_told_in_its_own_terms(built: Path) -> None:
    runner = opened(built, HostDevice())
    with pytest.raises(PromptError, match=r"a batch of 5 .* up to 4"):
        runner.new_cache(5, 8)
    cache = runner.new_cache(1, 64)
    runner.forward(cache, np.zeros((1, 30), np.int64), np.array([30]))
    with pytest.raises(EngineError, match=r"built for no such shapes: input_ids \[1, 6\]"):
        for _ in range(2):
            runner.forward(cache, np.zeros((1, 6), np.int64), np.array([2]))
    assert cache.lengths[0] == 32  # what ran has been kept
    with pytest.raises(BundleError, match="no head 'other' is loaded"):
        runner.head(np.zeros((1, HIDDEN), np.float32), "other")
    with pytest.raises(BundleError, match="candidates were expected"):
        runner.quantised(np.zeros((1, HIDDEN), np.float32))


def test_a_generator_runs_on_plans(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(built, HostDevice(), capture=True).cpu_operators() == {}


def test_without_a_gpu_nothing_of_tensorrt_is_touched(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = GpuProbe(None, (), "libcuda.so.1 cannot be loaded: no NVIDIA driver is installed here")
    monkeypatch.setattr("headport.runtime.tensorrt.guard.probe_gpu", lambda: fault)

    def touched(*_: Any) -> None:
        raise AssertionError("TensorRT was touched")

    monkeypatch.setattr(runner_module, "load_backend", touched)
    monkeypatch.setattr(runner_module, "CudaDevice", touched)
    bundle = Bundle(built, _manifest(built))
    monkeypatch.setattr("headport.runtime.tensorrt.guard.strangers", lambda *_: [])
    with pytest.raises(NoGpuError, match=r"no NVIDIA driver.*--provider cpu"):
        open_plans(bundle)


@pytest.mark.parametrize(
    ("probe", "version", "message"),
    [
        (
            GpuProbe("13.0", (Gpu("h", "9.0", 1),), None),
            "1.7.1",
            "built for SM89; the GPU here is SM90",
        ),
        (CARD, "1.8.0", "built with tensorrt-rtx 1.7.1, 1.8.0 is installed"),
    ],
)
def test_another_machine_is_told_apart(
    built: Path, probe: GpuProbe, version: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle(built, _manifest(built))
    record = read_engines(bundle)["backbone"]
    with pytest.raises(EngineError, match=f"{message}.*headport engine lowered -o built"):
        require_usable(bundle, record, probe=probe, version=version)
    require_usable(bundle, record, probe=CARD, version="1.7.1")


def test_a_plan_of_another_bundle_is_refused(built: Path) -> None:
    bundle = Bundle(built, _manifest(built))
    record = read_engines(bundle)["backbone"]
    assert record.bundle_sha256 == bundle_digest(bundle.manifest)
    foreign = msgspec.structs.replace(record, bundle_sha256="0" * 64)
    with pytest.raises(BundleError, match=r"made from another bundle.*headport engine"):
        require_usable(bundle, foreign, probe=CARD, version="1.7.1")
    swapped = msgspec.structs.replace(record, plan_sha256="0" * 64)
    with pytest.raises(BundleError, match="is another plan"):
        require_usable(bundle, swapped, probe=CARD, version="1.7.1")
    head = read_engines(bundle)["head.lm"]
    exchanged = msgspec.structs.replace(head, graph="backbone")
    with pytest.raises(BundleError, match=r"made from another graph than backbone.onnx"):
        require_usable(bundle, exchanged, probe=CARD, version="1.7.1")
    unknown = msgspec.structs.replace(head, graph="head.other")
    with pytest.raises(BundleError, match=r"a graph 'head.other' that is not here"):
        require_usable(bundle, unknown, probe=CARD, version="1.7.1")


def _library() -> Any:
    with standing_in() as library:
        return library


def _stripped(built: Path, tmp_path: Path) -> Path:
    """The backbone's plan as the stand-in writes it without weights."""
    head = (built / "engines" / "backbone.plan").read_bytes().split(b"\n", 1)[0]
    file = tmp_path / "backbone.plan"
    file.write_text(json.dumps(json.loads(head) | {"model": ""}) + "\n")
    return file


def test_a_plan_without_weights_takes_those_of_its_graph(built: Path, tmp_path: Path) -> None:
    file, trt, device = _stripped(built, tmp_path), _library(), HostDevice()
    bundle = Bundle(built, _manifest(built))
    record = read_engines(bundle)["backbone"]
    stripped = msgspec.structs.replace(record, flags=("STRIP_PLAN",))
    require_usable(bundle, stripped, probe=CARD, version="1.7.1")
    refitted = Plan(trt, file, device, weights=built / "backbone.onnx")
    whole = Plan(trt, built / record.plan, device)
    assert (refitted.inputs, refitted.outputs) == (whole.inputs, whole.outputs)
    with pytest.raises(AttributeError):  # the stand-in has nothing to run before that
        Plan(trt, file, device)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("foreign", r"backbone\.onnx does not fit the plan: no kernel; build it again"),
        ("missing", r"no weights for w0, w1, w2, w3, w4 and 2 more"),
        ("refit", r"refuses the weights of backbone\.onnx"),
    ],
)
def test_weights_that_do_not_fit(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    file, trt = _stripped(built, tmp_path), _library()
    monkeypatch.setenv("HEADPORT_FAKE", fault)
    with pytest.raises(EngineError, match=message):
        Plan(trt, file, HostDevice(), weights=built / "backbone.onnx")


def test_a_library_that_cannot_refit(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, trt = _stripped(built, tmp_path), _library()
    monkeypatch.delattr(trt, "OnnxParserRefitter")
    with pytest.raises(EngineError, match=r"tensorrt_rtx 1\.7\.1 puts no weights into an engine"):
        Plan(trt, file, HostDevice(), weights=built / "backbone.onnx")


def test_plans_for_later_versions_may_run_their_own_code(built: Path) -> None:
    bundle = Bundle(built, _manifest(built))
    record = msgspec.structs.replace(
        read_engines(bundle)["backbone"], flags=("VERSION_COMPATIBLE",)
    )
    require_usable(bundle, record, probe=CARD, version="1.8.0")
    trt, plan = _library(), built / record.plan
    assert Plan(trt, plan, HostDevice(), carries_code=True)._runtime.engine_host_code_allowed
    assert not hasattr(Plan(trt, plan, HostDevice())._runtime, "engine_host_code_allowed")


def test_opened_plans_are_treated_as_they_were_built(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def note(trt: Any, file: Path, device: Any, **options: Any) -> Any:
        seen[file.name] = options
        return SimpleNamespace(largest=lambda name: (4, 6))

    bundle = Bundle(built, _manifest(built))
    records = read_engines(bundle)
    flags = {"backbone": ("STRIP_PLAN",), "head.lm": ("VERSION_COMPATIBLE",)}
    changed = {n: msgspec.structs.replace(r, flags=flags[n]) for n, r in records.items()}
    monkeypatch.setattr(runner_module, "read_engines", lambda _: changed)
    monkeypatch.setattr(runner_module, "require_usable", lambda *_: None)
    monkeypatch.setattr(runner_module, "load_backend", lambda _: None)
    monkeypatch.setattr(runner_module, "CudaDevice", HostDevice)
    monkeypatch.setattr(runner_module, "Plan", note)
    open_plans(bundle)
    assert seen["backbone.plan"]["weights"] == built / "backbone.onnx"
    assert not seen["backbone.plan"]["carries_code"]
    assert seen["head.lm.plan"]["weights"] is None and seen["head.lm.plan"]["carries_code"]


def test_two_records_of_one_graph_are_refused(built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    shutil.copytree(built, folder)
    shutil.copyfile(folder / "engines/head.lm.json", folder / "engines/other.json")
    manifest = _manifest(built)
    files = manifest.files | {"engines/other.json": manifest.files["engines/head.lm.json"]}
    manifest = msgspec.structs.replace(manifest, files=files)
    with pytest.raises(BundleError, match=r"a second one of head.lm found"):
        read_engines(Bundle(folder, manifest))


def test_a_damaged_plan_is_refused(built: Path, tmp_path: Path) -> None:
    trt = _library()
    file = tmp_path / "x.plan"
    file.write_bytes(b"\0\1\2")
    with pytest.raises(EngineError, match=r"x.plan: the library does not load it"):
        Plan(trt, file, HostDevice())
