"""The operator as ONNX Runtime runs it: right values, any dimensions, every wrong input refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from headport.doctor import diagnose
from headport.errors import BundleError, UsageError
from headport.kernels import DOMAIN, OPTION, VERSION, needed_kernels
from headport.session import Session, SessionSettings, open_session

OPTIONS = {OPTION: str(VERSION)}


def _session(
    folder: Path, library: Path, weight: np.ndarray, scale: np.ndarray, **sizes: int
) -> Session:
    given = ", ".join(f"{name} = {value}" for name, value in sizes.items())
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["": 23, "{DOMAIN}": 1]>
        product (float[batch, sequence, k] x, uint8[n, b, c] w, float[n, b] s)
          => (float[batch, sequence, m] y)
        {{ y = {DOMAIN}.BlockMatMul <{given}> (x, w, s) }}
    """)
    for name, array in (("w", weight), ("s", scale)):
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


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("block", "K"), [(32, 70), (64, 64), (256, 300)])
@pytest.mark.parametrize("N", [1, 1000])
def test_the_product(tmp_path: Path, library: Path, bits: int, block: int, K: int, N: int) -> None:
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
    )
    zero = 1 << (bits - 1)
    weight = ((stored.astype(float) - zero) * np.repeat(scale.astype(float), block, 1))[:, :K]
    x = rng.normal(0, 1, (3, 11, K)).astype(np.float32)
    found = _product(session, x)
    assert found.shape == (3, 11, N)
    magnitude = np.abs(x.astype(float)) @ np.abs(weight).T
    largest = np.abs(x).max() * np.abs(weight).sum(1)
    assert (np.abs(found - x.astype(float) @ weight.T) <= largest / 65534 + 1e-6 * magnitude).all()
    # A row is the same bit for bit alone, and as part of another batch.
    np.testing.assert_array_equal(_product(session, x[1:2, 4:5])[0, 0], found[1, 4])
    assert _product(session, x[:0]).shape == (0, 11, N)


def test_the_librarys_own_test(tested: Path) -> None:
    done = subprocess.run([tested / "kernel_test"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_library_that_registers_nothing(tmp_path: Path, library: Path) -> None:
    source = tmp_path / "empty.cc"
    source.write_text(
        'extern "C" void* RegisterCustomOps(void*, void*) { return nullptr; }\n'
        'extern "C" int headport_kernels_version() { return 1; }\n'
        'extern "C" const char* headport_kernels_name() { return "none"; }\n'
    )
    empty = tmp_path / "empty.so"
    subprocess.run(["c++", "-shared", "-fPIC", source, "-o", empty], check=True)
    with pytest.raises(UsageError, match="registered no operators for ONNX Runtime"):
        _session(
            tmp_path,
            empty,
            _ones(2, 2, 32),
            np.ones((2, 2), np.float32),
            N=2,
            K=64,
            bits=8,
            block_size=32,
        )


def _ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.uint8)


def test_wrong_sizes_are_refused(tmp_path: Path, library: Path) -> None:
    scale = np.ones((2, 2), np.float32)
    sizes = {"N": 2, "K": 64, "bits": 8, "block_size": 32}
    for wrong, message in (
        ({"block_size": 16}, "block_size of 32 to 256 were expected"),
        ({"bits": 2}, "bits 4 or 8"),
        ({"N": 0}, "N and K above 0"),
    ):
        with pytest.raises(BundleError, match=message):
            _session(tmp_path, library, _ones(2, 2, 32), scale, **sizes | wrong)
    session = _session(tmp_path, library, _ones(2, 2, 31), scale, **sizes)
    with pytest.raises(Exception, match="W of 128 elements was expected, 124 were found"):
        _product(session, np.ones((1, 1, 64), np.float32))
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
    with pytest.raises(BundleError, match="kernels of version 2, this headport knows 1"):
        needed_kernels({OPTION: "2"})
    [check] = [c for c in diagnose().checks if "HEADPORT_KERNELS" in c.name]
    assert check.passed and check.found == f"version {VERSION}, {found.instructions}"
    (tmp_path / "text").write_text("no library")
    monkeypatch.setenv("HEADPORT_KERNELS", str(tmp_path / "text"))
    [check] = [c for c in diagnose().checks if "HEADPORT_KERNELS" in c.name]
    assert not check.passed and "not a library of headport's kernels" in check.found
    for wrong in (tmp_path / "text", tmp_path / "absent"):
        with pytest.raises(UsageError, match="not a library of headport's kernels"):
            needed_kernels(OPTIONS, wrong)
