"""Reading tensors through the ledger alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.ledger import find_tensor, head_weight, read_tensor
from headport.manifest import Tensor
from tests.bundles import manifest, write_bundle
from tests.toy_bundles import write_toy


def _weight() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)


def test_values_are_those_that_were_written(tmp_path: Path) -> None:
    bundle = write_toy(tmp_path / "toy", _weight())
    entry, initializer = head_weight(bundle.manifest, bundle.manifest.heads["lm"])
    assert initializer == "w" and entry == find_tensor(bundle.manifest, "head.lm", "w")
    assert (read_tensor(bundle, entry) == _weight()).all()


def test_a_tied_weight_has_another_name_in_the_head(tmp_path: Path) -> None:
    bundle = write_toy(tmp_path / "toy", _weight(), tied=True)
    entry, initializer = head_weight(bundle.manifest, bundle.manifest.heads["lm"])
    assert (entry.name, initializer) == ("embed", "w")
    assert entry.consumers == ("backbone:embed", "head.lm:w")


def _with_bytes(folder: Path, data: bytes, dtype: str, shape: tuple[int, ...]) -> Bundle:
    bundle = write_bundle(folder)
    (bundle.path / "data/shared.bin").write_bytes(data)
    tensor = msgspec.structs.replace(
        bundle.manifest.tensors[0], dtype=dtype, shape=shape, length=len(data)
    )
    return Bundle(bundle.path, msgspec.structs.replace(bundle.manifest, tensors=(tensor,)))


def test_bfloat16_is_widened(tmp_path: Path) -> None:
    # 1.0, -2.0 and infinity: the upper halves of their float32 forms
    data = np.array([0x3F80, 0xC000, 0x7F80], np.uint16).tobytes()
    bundle = _with_bytes(tmp_path / "b", data, "bfloat16", (3,))
    assert read_tensor(bundle, bundle.manifest.tensors[0]).tolist() == [1.0, -2.0, np.inf]


@pytest.mark.parametrize(
    ("dtype", "shape", "text"),
    [("float", (2,), "8 bytes expected"), ("complex64", (1,), "complex64 cannot be read")],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], text: str
) -> None:
    bundle = _with_bytes(tmp_path / "b", b"\0" * 4, dtype, shape)
    with pytest.raises(BundleError, match=text):
        read_tensor(bundle, bundle.manifest.tensors[0])


def test_missing_entries_are_named() -> None:
    known = manifest()
    with pytest.raises(BundleError, match=r"no entry for head\.lm:x"):
        find_tensor(known, "head.lm", "x")
    other = msgspec.structs.replace(known.heads["lm"], weight="elsewhere")
    with pytest.raises(BundleError, match=r"no weight 'elsewhere' that head\.lm reads"):
        head_weight(known, other)
    assert isinstance(find_tensor(known, "head.lm", "w"), Tensor)
