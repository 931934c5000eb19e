"""Weights are looked for in a plan byte by byte, by rows and by columns."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from headport.errors import ParityError
from headport.manifest import Tensor
from headport.runtime.engine.proof import _by_columns, _holds, check_proofs, prove_weights
from tests.toy_bundles import write_toy


def entry(dtype: str, *shape: int) -> Tensor:
    return Tensor(
        name="w", sha256="", dtype=dtype, shape=shape, file="f", offset=0, length=0, consumers=()
    )


def test_columns_by_hand():
    assert _by_columns(bytes([1, 2, 3, 4, 5, 6]), entry("int8", 2, 3)) == bytes([1, 4, 2, 5, 3, 6])
    assert _by_columns(b"aabbccdd", entry("float16", 2, 2)) == b"aaccbbdd"
    # Nibbles 1 2 | 3 4 | 5 6, the first one low; by columns 1 4 | 2 5 | 3 6.
    assert _by_columns(bytes([0x21, 0x43, 0x65]), entry("int4", 2, 3)) == bytes([0x41, 0x52, 0x63])


def test_an_odd_number_of_nibbles_is_filled_up():
    values = np.array([[1], [2], [3]], np.int8).astype(ml_dtypes.int4)
    assert values.size == 3
    assert _by_columns(bytes([0x21, 0x03]), entry("int4", 3, 1)) == bytes([0x21, 0x03])


@pytest.mark.parametrize("start", [0, 5, 300])
def test_a_weight_is_found_wherever_it_lies(tmp_path: Path, start: int) -> None:
    weight = bytes(1000) + np.random.default_rng(0).bytes(3000)
    file = tmp_path / "plan"
    file.write_bytes(b"\0" * start + weight + b"end")
    assert _holds(file, weight)
    file.write_bytes(b"\0" * start + weight[:-1] + b"#end")
    assert not _holds(file, weight)


def test_a_weight_that_is_not_there_fails_only_where_it_is_narrow(tmp_path: Path) -> None:
    weight = np.random.default_rng(1).normal(size=(31, 8)).astype(np.float16)
    bundle = write_toy(tmp_path / "a", weight)
    plan = tmp_path / "x.plan"
    plan.write_bytes(np.ascontiguousarray(weight.T).tobytes())
    [proof] = prove_weights(bundle, "head.lm", plan, merged=False)
    assert (proof.found, proof.layout, proof.plan_bytes_per_element) == (True, "columns", 2.0)
    plan.write_bytes(b"something else")
    [proof] = prove_weights(bundle, "head.lm", plan, merged=False)
    assert not proof.found
    check_proofs([proof])
    import msgspec

    with pytest.raises(ParityError, match="the builder widened it"):
        check_proofs([msgspec.structs.replace(proof, dtype="int8")])
    assert not prove_weights(bundle, "backbone", plan, merged=False)
