"""Rounded matrices are, number by number, those that `headport quantize` writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headport.errors import QuantizeError
from headport.graphs import load_graphs
from headport.ledger import find_tensor, read_tensor
from headport.lowering.matrices import find_matrices
from headport.manifest import StoredMatrix
from headport.quantize.command import quantize
from headport.quantize.mix.rounding import RoundedMatrices
from headport.quantize.options import Options
from tests.quantize import mlp_bundles as mlp


@pytest.mark.parametrize(("name", "block"), [("int4", 16), ("int8", 32), ("fp16", None)])
def test_weights_and_bytes_are_those_that_are_written(
    tmp_path: Path, name: str, block: int | None
) -> None:
    source = mlp.mlp_bundle(tmp_path / "b")
    asked = Options(
        bundle=source.path,
        output=tmp_path / "q",
        backbone=name,  # type: ignore[arg-type]
        backbone_block=block,  # type: ignore[arg-type]
    )
    written = quantize(asked)
    how = StoredMatrix(format=name, block=block)  # type: ignore[arg-type]
    matrices, _ = find_matrices(load_graphs(source)["backbone"])
    (tmp_path / "r").mkdir()
    rounded = RoundedMatrices(matrices, (how, None), tmp_path / "r")
    chosen = [matrix.name for matrix in matrices[:-1]]
    found = rounded.weights(dict.fromkeys(chosen, how))
    for matrix in matrices:
        initializer = matrix.value.name or ""
        if matrix.name not in chosen:
            assert found[initializer] is rounded.originals[initializer]
            continue
        stored = find_tensor(written.manifest, "backbone", f"{matrix.name}.{name}")
        weight, nbytes = read_tensor(written, stored).astype(np.float32), stored.length
        if block is not None:
            scale = find_tensor(written.manifest, "backbone", f"{matrix.name}.scale")
            step = np.repeat(read_tensor(written, scale), block, axis=1)
            weight, nbytes = weight * step[:, : weight.shape[1]], nbytes + scale.length
        expected = weight if matrix.rows_first else weight.T
        np.testing.assert_array_equal(found[initializer], expected)
        assert rounded.nbytes(matrix.name, how) == nbytes
        assert rounded.nbytes(matrix.name, None) == 4 * weight.size


def test_half_precision_is_refused(tmp_path: Path) -> None:
    matrices, _ = find_matrices(mlp.backbone(mlp.weights(), "float16"))
    with pytest.raises(QuantizeError, match="is float16, float32 was expected"):
        RoundedMatrices(matrices, (None, None), tmp_path)
