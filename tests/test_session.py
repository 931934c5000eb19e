"""The one factory of sessions: options, thread counts, errors, and buffers bound in place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headport import session
from headport.errors import BundleError, RunError, UsageError
from headport.gpu_probe import GpuProbe
from headport.providers import PROVIDERS
from headport.session import Session, SessionSettings, open_session


def _session(folder: Path, text: str, settings: SessionSettings | None = None) -> Session:
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 23]>\n{text}')
    ir.save(model, folder / "m.onnx")
    return open_session(folder / "m.onnx", {}, settings)


ADD_ROWS = "g (float[n, 2] x, float[n, 2] y) => (float[n, 2] z) { z = Add (x, y) }"
ADD = "g (float[n] x, float[n] y) => (float[n] z) { z = Add (x, y) }"


@pytest.mark.parametrize("threads", [-1, 10**6])
def test_threads_out_of_range_are_refused(threads: int) -> None:
    with pytest.raises(UsageError, match=f"from 1 to 1024, or 0 for all.*{threads} was given"):
        SessionSettings(threads=threads)


def test_ports_and_run(tmp_path: Path) -> None:
    found = _session(tmp_path, "g (float16[n, 3] x) => (float16[n, 3] y) { y = Neg (x) }")
    assert (found.inputs, found.outputs, found.shape("x")) == (("x",), ("y",), ("n", 3))
    assert found.dtype("x") == np.float16 and found.dtype("y") == np.float16
    assert found.run({"x": np.ones((2, 3), np.float16)})["y"].tolist() == [[-1] * 3] * 2


def test_bound_buffers_are_seen_and_updated_in_place(tmp_path: Path) -> None:
    found = _session(tmp_path, ADD)
    x, y = np.array([1, 2], np.float32), np.array([10, 20], np.float32)
    binding = found.bind()
    binding.input("x", x)
    binding.input("y", y)
    binding.output("z", y)  # the sum replaces y
    for expected in ([11, 22], [12, 24]):
        binding.run()
        assert y.tolist() == expected
    x[:] = 100
    binding.run()
    assert y.tolist() == [112, 124]


def test_bound_buffers_stay_alive(tmp_path: Path) -> None:
    binding = _session(tmp_path, ADD).bind()
    out = np.zeros(4, np.float32)
    binding.input("x", np.full(4, 1, np.float32))  # nobody else keeps these
    binding.input("y", np.full(4, 2, np.float32))
    binding.output("z", out)
    _ = [np.full(4, 9, np.float32) for _ in range(100)]  # would reuse freed memory
    binding.run()
    assert out.tolist() == [3] * 4


def test_buffers_that_would_be_copied_are_refused(tmp_path: Path) -> None:
    binding = _session(tmp_path, ADD).bind()
    with pytest.raises(ValueError, match="C-contiguous and writable"):
        binding.input("x", np.zeros(8, np.float32)[::2])
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="C-contiguous and writable"):
        binding.output("z", frozen)


def test_session_options_reach_the_session(tmp_path: Path) -> None:
    # DequantizeLinear → MatMul is fused and rounds activations, unless the option forbids it.
    rng = np.random.default_rng(0)
    H, V, block = 64, 32, 32
    q = rng.integers(-127, 128, (H, V)).astype(np.int8)
    scale = rng.uniform(0.001, 0.01, (H // block, V)).astype(np.float32)
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 23]>\n'
        f"g (float[n, {H}] x, int8[{H}, {V}] q, float[{H // block}, {V}] s) => (float[n, {V}] y) {{"
        f" w = DequantizeLinear <axis = 0, block_size = {block}> (q, s) y = MatMul (x, w) }}"
    )
    from tests.toy_bundles import register

    register(model, "q", q)
    register(model, "s", scale)
    ir.save(model, tmp_path / "m.onnx")
    x = rng.normal(size=(1, H)).astype(np.float32)
    expected = x.astype(np.float64) @ (q * np.repeat(scale.astype(np.float64), block, axis=0))
    key = "session.qdq_matmulnbits_accuracy_level"
    errors = {
        level: np.abs(open_session(tmp_path / "m.onnx", {key: level}).run({"x": x})["y"] - expected)
        for level in ("0", "4")
    }
    assert errors["0"].max() < 1e-5 < 1e-3 < errors["4"].max()


def test_unreadable_graphs_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"not a graph")
    with pytest.raises(BundleError, match=r"m\.onnx: ONNX Runtime cannot load it"):
        open_session(tmp_path / "m.onnx", {})


def test_what_fails_while_it_runs_names_the_file(tmp_path: Path) -> None:
    found = _session(tmp_path, ADD)
    x, y = np.ones(2, np.float32), np.ones(3, np.float32)
    message = r"^m\.onnx: ONNX Runtime failed while it ran the graph: .*Add"
    with pytest.raises(RunError, match=message):
        found.run({"x": x, "y": y})
    binding = found.bind()
    binding.input("x", x)
    binding.input("y", y)
    binding.output("z", np.zeros(3, np.float32))
    with pytest.raises(RunError, match=message):
        binding.run()


def test_a_provider_that_is_not_there_is_refused(tmp_path: Path) -> None:
    settings = SessionSettings(provider="NoSuchExecutionProvider")
    with pytest.raises(UsageError, match="'NoSuchExecutionProvider': use one of cpu, cuda"):
        _session(tmp_path, ADD, settings)
    with pytest.raises(UsageError, match=r"CUDAExecutionProvider (is not in this|needs a GPU)"):
        _session(tmp_path, ADD, SessionSettings(provider="cuda"))


def test_device_arrays_are_read_and_written_in_place(tmp_path: Path) -> None:
    found = _session(tmp_path, ADD_ROWS)
    given = np.array([[1, 2], [3, 4]], np.float32)
    x, y = found.array(given), found.array(np.full((2, 2), 10, np.float32))
    given[:] = 0  # theirs, not ours
    binding = found.bind()
    for name, value in (("x", x), ("y", y)):
        binding.input(name, value)
    binding.output("z", y)
    binding.run()
    assert y.numpy().tolist() == [[11, 12], [13, 14]]
    x.fill(np.ones((2, 2), np.float32))
    binding.run()
    assert y.numpy().tolist() == [[12, 13], [14, 15]]
    with pytest.raises(AssertionError):
        x.fill(np.ones((1, 2), np.float32))


def test_a_row_of_a_device_array_is_bound_alone(tmp_path: Path) -> None:
    found = _session(tmp_path, ADD_ROWS)
    cache = found.array(np.array([[1, 2], [3, 4], [5, 6]], np.float32))
    binding = found.bind()
    binding.input("x", found.array(np.array([[10, 20]], np.float32)))
    binding.input("y", cache.row(1))
    binding.output("z", cache.row(1))
    binding.run()
    assert cache.numpy().tolist() == [[1, 2], [13, 24], [5, 6]]


class _Part:
    def __init__(self, provider: str, *operators: str) -> None:
        self.ep_name = provider
        self._nodes = [SimpleNamespace(op_type=name) for name in operators]

    def get_nodes(self) -> list[SimpleNamespace]:
        return self._nodes


def _gpu_library(monkeypatch: pytest.MonkeyPatch, parts: list[_Part]) -> list[dict[str, Any]]:
    """An ONNX Runtime whose CUDA provider works, and what it was asked for."""
    asked: list[dict[str, Any]] = []

    class _Options:
        def __init__(self) -> None:
            self.entries: dict[str, str] = {}

        def add_session_config_entry(self, key: str, value: str) -> None:
            self.entries[key] = value

    def inference(file: str, options: _Options, providers: list[Any]) -> SimpleNamespace:
        del file
        asked.append({"entries": options.entries, "providers": providers})
        on_cpu = any(part.ep_name == "CPUExecutionProvider" for part in parts)
        if on_cpu and options.entries["session.disable_cpu_ep_fallback"] == "1":
            raise RuntimeError(
                "This session contains graph nodes that are assigned to the default CPU EP, but "
                "fallback to CPU EP has been explicitly disabled by the user."
            )
        return SimpleNamespace(
            get_inputs=list,
            get_outputs=list,
            get_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
            get_provider_graph_assignment_info=lambda: parts,
        )

    library = SimpleNamespace(
        SessionOptions=_Options,
        InferenceSession=inference,
        GraphOptimizationLevel=SimpleNamespace(ORT_ENABLE_ALL=99),
        get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
    )
    monkeypatch.setattr(session, "_onnxruntime", lambda: library)
    monkeypatch.setattr(session, "probe_gpu", lambda: GpuProbe("13.0", (), None))
    monkeypatch.setattr(session, "missing_libraries", lambda provider: {})
    return asked


def test_operators_on_the_cpu_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [
        _Part("CUDAExecutionProvider", "MatMul"),
        _Part("CPUExecutionProvider", "Range", "Concat"),
        _Part("CPUExecutionProvider", "Range"),
    ]
    asked = _gpu_library(monkeypatch, parts)
    with pytest.raises(UsageError, match=r"to the CPU: 1 × Concat, 2 × Range; pass --cpu-fallback"):
        open_session(Path("m.onnx"), {}, SessionSettings(provider="cuda"))
    assert asked[0]["entries"]["session.disable_cpu_ep_fallback"] == "1"
    [(name, options)] = asked[0]["providers"]
    assert name == "CUDAExecutionProvider" and options["use_tf32"] == "0"


def test_accepted_operators_on_the_cpu_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [_Part("CUDAExecutionProvider", "MatMul"), _Part("CPUExecutionProvider", "Range")]
    _gpu_library(monkeypatch, parts)
    settings = SessionSettings(provider="cuda", cpu_fallback=True)
    found = open_session(Path("m.onnx"), {}, settings)
    assert found.cpu_operators == {"Range": 1}
    shown = "".join(capsys.readouterr())
    assert "m.onnx: on the CPU, not on CUDAExecutionProvider: 1 × Range" in shown


def test_a_provider_that_is_not_here_gives_way_only_where_that_is_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _gpu_library(monkeypatch, [])
    monkeypatch.setattr(session, "probe_gpu", lambda: GpuProbe(None, (), "there is none"))
    strict = SessionSettings(provider="cuda").for_target("portable")
    with pytest.raises(UsageError, match="CUDAExecutionProvider needs a GPU: there is none"):
        open_session(Path("m.onnx"), {}, strict)
    assert "".join(capsys.readouterr()) == ""
    for asked in (SessionSettings(cpu_fallback=True), SessionSettings(0, "cuda", True)):
        found = asked.for_target("ort-cuda")
        assert found.provider == "CPUExecutionProvider"
        shown = "".join(capsys.readouterr())
        assert "needs a GPU: there is none; everything runs on the CPU instead" in shown
        assert found.for_target("ort-cuda") == found
        assert "".join(capsys.readouterr()) == "", "it is said once"
    monkeypatch.setattr(session, "probe_gpu", lambda: GpuProbe("13.0", (), None))
    assert asked.for_target("ort-cuda").provider == "CUDAExecutionProvider"


def test_what_a_provider_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu_library(monkeypatch, [])
    cuda = PROVIDERS["cuda"]
    session.check_provider(cuda)
    monkeypatch.setattr(session, "missing_libraries", lambda _: {"libx.so.1": "pip install x"})
    with pytest.raises(UsageError, match=r"lacks libraries: libx.so.1 \(pip install x\)"):
        session.check_provider(cuda)
    monkeypatch.setattr(session, "probe_gpu", lambda: GpuProbe(None, (), "there is none"))
    with pytest.raises(UsageError, match="CUDAExecutionProvider needs a GPU: there is none"):
        session.check_provider(cuda)
