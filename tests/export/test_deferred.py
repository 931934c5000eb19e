"""Deferred tensors have the values of ordinary ones, and read no more than they need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headport.errors import CheckpointError
from headport.export import deferred
from headport.export.deferred import (
    DeferredTensor,
    NotDeferrableError,
    blocks,
    in_memory,
    recording,
    replace_deferred,
    same_value,
    stored_parts,
)
from headport.export.shards import StoredTensor, read_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {
        "w": torch.randn(7, 5),
        "half": torch.randn(7, 5).bfloat16(),
        "experts.0": torch.randn(4, 3),
        "experts.1": torch.randn(4, 3),
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def stored(file: Path, name: str) -> DeferredTensor:
    return DeferredTensor.stored(read_header(file)[name])


def real(file: Path, name: str) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(file)[name]


@pytest.mark.parametrize("name", ["w", "half", "scalar", "flags"])
def test_values_are_those_of_the_file(file: Path, name: str) -> None:
    tensor = stored(file, name)
    assert (tensor.shape, tensor.dtype) == (real(file, name).shape, real(file, name).dtype)
    assert torch.equal(tensor.evaluate(), real(file, name))
    assert torch.equal(torch.cat([*blocks(tensor, 1)]).reshape(tensor.shape), real(file, name))


RECIPES = {
    "conversion": lambda get: get("half").to(torch.float32),
    "stack": lambda get: torch.stack([get("experts.0"), get("experts.1")]),
    "stack within": lambda get: torch.stack([get("experts.0"), get("experts.1")], dim=-1),
    "join rows": lambda get: torch.cat([get("experts.0"), get("experts.1")]).to(torch.float16),
    "join columns": lambda get: torch.cat([get("experts.0"), get("experts.1")], dim=1),
    "transpose": lambda get: get("w").T.contiguous(),
    "transpose of experts": lambda get: torch.stack([get("experts.0")] * 2).transpose(1, 2),
    "split": lambda get: get("w").split([3, 4])[1].contiguous(),
    "permute": lambda get: get("w").reshape(7, 5, 1).permute(2, 0, 1) * 2,
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_recorded_gives_what_it_would_have_given(file: Path, recipe: str) -> None:
    expected = RECIPES[recipe](lambda name: real(file, name))
    with recording() as refusals:
        tensor = RECIPES[recipe](lambda name: stored(file, name))
    assert isinstance(tensor, DeferredTensor)
    assert not refusals
    assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(tensor.evaluate(), expected)
    assert torch.equal(torch.cat([*blocks(tensor, 1)]), expected)
    assert {part.name for part in stored_parts(tensor)} <= read_header(file).keys()


def test_only_what_is_needed_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int, int | None]] = []
    genuine = StoredTensor.read

    def spy(self: StoredTensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        read.append((self.name, start, stop))
        return genuine(self, start, stop)

    monkeypatch.setattr(StoredTensor, "read", spy)
    with recording():
        experts = torch.stack([stored(file, "experts.0"), stored(file, "experts.1")])
        table = stored(file, "half").to(torch.float32)
    assert not read
    assert torch.equal(experts[1], real(file, "experts.1"))
    assert read == [("experts.1", 0, None)]
    read.clear()
    ids = torch.tensor([[6, 2], [2, 6]])
    found = torch.nn.functional.embedding(ids, table)
    assert torch.equal(found, real(file, "half").float()[ids])
    assert read == [("half", 2, 3), ("half", 6, 7)]


def test_a_model_runs_on_weights_in_their_file(file: Path) -> None:
    layer = torch.nn.Linear(5, 7, bias=False)
    layer.weight = torch.nn.Parameter(stored(file, "w"))
    x = torch.randn(2, 5)
    with torch.no_grad():
        assert torch.equal(layer(x), torch.nn.functional.linear(x, real(file, "w")))
        with in_memory(layer):
            assert not isinstance(layer.weight, DeferredTensor)
            assert torch.equal(layer.weight, real(file, "w"))
    assert isinstance(layer.weight, DeferredTensor)


def test_a_shared_weight_stays_shared(file: Path) -> None:
    first, second = torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(5, 7, bias=False)
    first.weight = second.weight = torch.nn.Parameter(stored(file, "w"))
    model = torch.nn.Sequential(first, second)
    replace_deferred(model, DeferredTensor.evaluate)
    assert first.weight is second.weight
    assert not isinstance(first.weight, DeferredTensor)


def test_same_value_needs_no_reading(file: Path) -> None:
    tensor = stored(file, "w")
    assert same_value(tensor, tensor.detach())
    assert not same_value(tensor, stored(file, "w"))
    assert not same_value(tensor, real(file, "w"))
    assert torch.equal(tensor, stored(file, "w"))
    assert not torch.equal(tensor, stored(file, "w") * 2)


@pytest.mark.parametrize(
    "operation", [lambda w: w.nonzero(), lambda w: w.mul_(2), lambda w: w.sum().item()]
)
def test_what_cannot_be_postponed_is_refused(file: Path, operation: object) -> None:
    tensor = stored(file, "w")
    with recording() as refusals, pytest.raises(NotDeferrableError):
        operation(tensor)  # type: ignore[operator]
    assert len(refusals) == 1
    assert not deferred._Mode.recording


def test_a_weight_is_not_changed_in_place(file: Path) -> None:
    # Afterwards it would be what it was, as if nothing had been done.
    with pytest.raises(NotDeferrableError, match="in place"):
        stored(file, "w").mul_(2)


def test_a_file_that_shrinks_is_noticed(file: Path) -> None:
    tensor = stored(file, "w")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="cut off"):
        tensor.evaluate()


@pytest.mark.parametrize("keep", [4, 40, -8])
def test_damaged_files_are_refused(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="not an intact safetensors file"):
        read_header(file)
