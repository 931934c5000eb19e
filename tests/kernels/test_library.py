"""The operator as ONNX Runtime runs it: right values, any dimensions, every wrong input refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headport.doctor import diagnose
from headport.errors import BundleError, UsageError
from headport.kernels import DOMAIN, OPTION, VERSION, needed_kernels
from headport.session import Session, SessionSettings, open_session

OPTIONS = {OPTION: str(VERSION)}


def _session(
    folder: Path,
    library: Path,
    weight: np.ndarray,
    scale: np.ndarray,
    *,
    activation: str = "none",
    epsilon: float = 0.0,
    activation_bits: int = 16,
    **sizes: int,
) -> Session:
    sizes |= {"activation_bits": activation_bits}
    given = "".join(f"{name} = {value}, " for name, value in sizes.items())
    given += f'activation = "{activation}", epsilon = {epsilon:.9f}'
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["": 23, "{DOMAIN}": {VERSION}]>
        product (float[batch, sequence, k] x, uint8[n, b, c] w, float[n, b] s)
          => (float[batch, sequence, m] y)
        {{ y = {DOMAIN}.BlockMatMul <{given}> (x, w, s) }}
    """)
    return _opened(folder, library, model, {"w": weight, "s": scale})


def _opened(
    folder: Path, library: Path, model: ir.Model, constants: dict[str, np.ndarray]
) -> Session:
    for name, array in constants.items():
        value = next(port for port in model.graph.inputs if port.name == name)
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(array, name=name)
        value.shape = ir.Shape(array.shape)
        model.graph.register_initializer(value)
    ir.save(model, folder / "product.onnx")
    return open_session(
        folder / "product.onnx", OPTIONS, SessionSettings(threads=2, kernels=library)
    )


def _product(session: Session, x: np.ndarray) -> np.ndarray:
    return session.run({"x": x})["y"]


@pytest.mark.parametrize(("bits", "activation_bits"), [(4, 16), (8, 16), (4, 8)])
@pytest.mark.parametrize(("block", "K"), [(32, 70), (64, 64), (256, 300)])
@pytest.mark.parametrize("N", [1, 1000])
def test_the_product(
    tmp_path: Path, library: Path, bits: int, activation_bits: int, block: int, K: int, N: int
) -> None:
    rng = np.random.default_rng(0)
    blocks = -(-K // block)
    stored = rng.integers(0, 1 << bits, (N, blocks * block), dtype=np.uint8)
    scale = rng.normal(0, 1, (N, blocks)).astype(np.float32)
    packed = stored if bits == 8 else stored[:, ::2] | stored[:, 1::2] << 4
    session = _session(
        tmp_path,
        library,
        packed.reshape(N, blocks, -1),
        scale,
        N=N,
        K=K,
        bits=bits,
        block_size=block,
        activation_bits=activation_bits,
    )
    zero = 1 << (bits - 1)
    weight = ((stored.astype(float) - zero) * np.repeat(scale.astype(float), block, 1))[:, :K]
    x = rng.normal(0, 1, (3, 11, K)).astype(np.float32)
    found = _product(session, x)
    assert found.shape == (3, 11, N)
    magnitude = np.abs(x.astype(float)) @ np.abs(weight).T
    largest = np.abs(x).max() * np.abs(weight).sum(1)
    lost = largest / (2**activation_bits - 2)
    assert (np.abs(found - x.astype(float) @ weight.T) <= lost + 1e-6 * magnitude).all()
    # A row is the same bit for bit alone, and as part of another batch.
    np.testing.assert_array_equal(_product(session, x[1:2, 4:5])[0, 0], found[1, 4])
    assert _product(session, x[:0]).shape == (0, 11, N)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("activation", "skips"), [("silu", True), ("gelu_tanh", False)])
def test_what_goes_before_and_after(
    tmp_path: Path, library: Path, activation: str, skips: bool, rows: int
) -> None:
    rng = np.random.default_rng(1)
    stored = rng.integers(0, 256, (12, 2, 32), dtype=np.uint8)
    constants = {
        "w": stored,
        "s": rng.normal(0, 0.01, (12, 2)).astype(np.float32),
        "gamma": rng.normal(1, 0.3, 50).astype(np.float32),
    }
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["": 23, "{DOMAIN}": {VERSION}]>
        product (float[r, 50] x, float[r, 50] skip, uint8[n, b, c] w, float[n, b] s, float[k] gamma)
          => (float[r, 6] y, float[r, 50] sum, float[r, 50] normed, float[r, 12] inner)
        {{
          y, sum, normed, inner = {DOMAIN}.BlockMatMul
            <N = 12, K = 50, bits = 8, block_size = 32, activation_bits = 16,
             activation = "{activation}", epsilon = 0.01>
            (x, w, s, {"skip" if skips else ""}, gamma)
        }}
    """)
    session = _opened(tmp_path, library, model, constants)
    x, skip = rng.normal(0, 1, (2, rows, 50)).astype(np.float32)
    found = session.run({"x": x, "skip": skip})
    total = (x + skip if skips else x).astype(float)
    np.testing.assert_allclose(found["sum"], total, atol=1e-6)
    normed = total / np.sqrt((total**2).mean(1, keepdims=True) + 0.01) * constants["gamma"]
    np.testing.assert_allclose(found["normed"], normed, atol=2e-6)
    step = np.repeat(constants["s"].astype(float), 32, 1).reshape(12, 64)
    weight = ((stored.reshape(12, 64).astype(float) - 128) * step)[:, :50]
    np.testing.assert_allclose(found["inner"], normed @ weight.T, atol=2e-3)
    gate, up = np.split(found["inner"].astype(float), 2, axis=1)
    if activation == "silu":
        gate = gate / (1 + np.exp(-gate))
    else:
        gate = gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2
    np.testing.assert_allclose(found["y"], gate * up, atol=1e-5)
    # Nothing that is left out changes what is kept, and a row is the same alone.
    model.graph.outputs[:] = model.graph.outputs[:1]
    for value in next(iter(model.graph)).outputs[1:]:
        value.name = ""
    alone = _opened(tmp_path, library, model, {})
    np.testing.assert_array_equal(alone.run({"x": x, "skip": skip})["y"], found["y"])
    last = {"x": x[-1:], "skip": skip[-1:]}
    np.testing.assert_array_equal(alone.run(last)["y"][0], found["y"][-1])


def test_the_librarys_own_test(tested: Path) -> None:
    done = subprocess.run([tested / "kernel_test"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _other(folder: Path, version: int, name: str = "RegisterCustomOps") -> Path:
    """A library that says it has this version, and registers nothing."""
    source, built = folder / f"{name}{version}.cc", folder / f"{name}{version}.so"
    source.write_text(
        f'extern "C" void* {name}(void*, void*) {{ return nullptr; }}\n'
        f'extern "C" int headport_kernels_version() {{ return {version}; }}\n'
        'extern "C" const char* headport_kernels_name() { return "none"; }\n'
    )
    subprocess.run(["c++", "-shared", "-fPIC", source, "-o", built], check=True)
    return built


def test_other_libraries(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"N": 2, "K": 64, "bits": 8, "block_size": 32}
    scale = np.ones((2, 2), np.float32)
    with pytest.raises(UsageError, match="registered no operators for ONNX Runtime"):
        _session(tmp_path, _other(tmp_path, VERSION), _ones(2, 2, 32), scale, **sizes)
    with pytest.raises(UsageError, match=f"version {VERSION} were expected, {VERSION - 1} were"):
        _session(tmp_path, _other(tmp_path, VERSION - 1), _ones(2, 2, 32), scale, **sizes)
    # As where its self-test fails: registering is what runs it.
    refused = _other(tmp_path, VERSION, "RegisterNothing")
    with pytest.raises(UsageError, match="expected to pass their self-test and be registered"):
        _session(tmp_path, refused, _ones(2, 2, 32), scale, **sizes)
    monkeypatch.setenv("HEADPORT_KERNELS", str(refused))
    [check] = [c for c in diagnose().checks if "HEADPORT_KERNELS" in c.name]
    assert not check.passed and "expected to pass their self-test" in check.found


def _ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.uint8)


def test_wrong_sizes_are_refused(tmp_path: Path, library: Path) -> None:
    scale = np.ones((2, 2), np.float32)
    sizes: dict[str, Any] = {"N": 2, "K": 64, "bits": 8, "block_size": 32}
    for wrong, message in (
        ({"block_size": 16}, "block_size of 32, 64, 128 or 256 were expected"),
        ({"activation": "relu"}, "activation none, silu or gelu_tanh was expected, relu was found"),
        ({"activation": "silu", "N": 3}, "an even N was expected for activation silu"),
        ({"bits": 2}, "bits 4 or 8"),
        ({"activation_bits": 8}, "8 with weights of 4 bits, were expected; 8 with weights of 8"),
        ({"activation_bits": 4}, "activation_bits 16, or 8 .* were expected; 4 with"),
        ({"N": 0}, "N and K above 0"),
    ):
        with pytest.raises(BundleError, match=message):
            _session(tmp_path, library, _ones(2, 2, 32), scale, **sizes | wrong)
    with pytest.raises(BundleError, match="W of 128 elements was expected, 124 were found"):
        _session(tmp_path, library, _ones(2, 2, 31), scale, **sizes)
    session = _session(tmp_path, library, _ones(2, 2, 32), scale, **sizes)
    with pytest.raises(Exception, match=r"X \[..., 64\] was expected, its last dimension is 63"):
        _product(session, np.ones((1, 1, 63), np.float32))


def test_a_library_that_is_none(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert needed_kernels({}) is None
    monkeypatch.delenv("HEADPORT_KERNELS", raising=False)
    with pytest.raises(UsageError, match="needs that library, which was not given; build it"):
        needed_kernels(OPTIONS)
    monkeypatch.setenv("HEADPORT_KERNELS", str(library))
    found = needed_kernels(OPTIONS)
    assert found is not None and found.version == VERSION and found.instructions
    with pytest.raises(BundleError, match=f"kernels of version 1, this headport knows {VERSION}"):
        needed_kernels({OPTION: "1"})
    [check] = [c for c in diagnose().checks if "HEADPORT_KERNELS" in c.name]
    assert check.passed and check.found == f"version {VERSION}, {found.instructions}"
    (tmp_path / "text").write_text("no library")
    monkeypatch.setenv("HEADPORT_KERNELS", str(tmp_path / "text"))
    [check] = [c for c in diagnose().checks if "HEADPORT_KERNELS" in c.name]
    assert not check.passed and "not a library of headport's kernels" in check.found
    for wrong in (tmp_path / "text", tmp_path / "absent"):
        with pytest.raises(UsageError, match="not a library of headport's kernels"):
            needed_kernels(OPTIONS, wrong)


def test_a_weight_that_is_no_constant(tmp_path: Path, library: Path) -> None:
    form = "N = 2, K = 64, bits = 8, block_size = 32, activation_bits = 16"
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["": 23, "{DOMAIN}": {VERSION}]>
        product (float[r, 64] x, uint8[2, 2, 32] w, float[2, b] s) => (float[r, 2] y)
        {{ y = {DOMAIN}.BlockMatMul <{form}, activation = "none", epsilon = 0.0> (x, w, s) }}
    """)
    session = _opened(tmp_path, library, model, {})
    x = np.ones((1, 64), np.float32)
    for stored in (129, 130):  # each time as it is given then
        feeds = {"x": x, "w": np.full((2, 2, 32), stored, np.uint8), "s": np.ones((2, 2), "f4")}
        np.testing.assert_allclose(session.run(feeds)["y"], 64.0 * (stored - 128), rtol=1e-4)
    with pytest.raises(Exception, match="S of 4 elements was expected, 6 were found"):
        session.run(feeds | {"s": np.ones((2, 3), np.float32)})
