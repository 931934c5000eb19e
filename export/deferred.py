"""Tensors that stay in their file until they are used.

A `DeferredTensor` knows where its bytes lie and which operations lead from them to its value. While
a checkpoint is loaded (`recording`), operations on it are noted down, not run: transformers'
renaming, conversion of data types, stacking of experts, splitting of fused matrices all become part
of the recipe, whatever they are. Afterwards any operation on it reads what it needs, computes, and
forgets: a whole PyTorch model runs with one weight in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from headport.export.shards import StoredTensor

__all__ = [
    "DeferredTensor",
    "NotDeferrableError",
    "blocks",
    "in_memory",
    "put_back",
    "recording",
    "replace_deferred",
    "same_value",
    "stored_parts",
]

_aten = torch.ops.aten
_BLOCK_BYTES = 1 << 24


class NotDeferrableError(RuntimeError):
    """An operation on a deferred tensor cannot be postponed; its file must be loaded as a whole."""


@dataclass(frozen=True)
class _Applied:
    """The value is an operation's result, or one of its results."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int | None


_Recipe = StoredTensor | _Applied


class _Mode:
    recording = False
    refusals: list[str] = []  # noqa: RUF012, replaced by every `recording`


@contextmanager
def recording() -> Iterator[list[str]]:
    """Note operations on deferred tensors down instead of running them, in every thread.

    Yields:
        The operations that could not be, as they occur: a caller may swallow the error.
    """
    before, _Mode.recording, _Mode.refusals = _Mode.recording, True, []
    try:
        yield _Mode.refusals
    finally:
        _Mode.recording = before


def _refusal(text: str) -> NotDeferrableError:
    _Mode.refusals.append(text)
    return NotDeferrableError(text)


class DeferredTensor(torch.Tensor):
    """A tensor on the CPU whose value is computed anew, from its file, each time it is used."""

    recipe: _Recipe

    @staticmethod
    def __new__(cls, _recipe: _Recipe, like: torch.Tensor) -> DeferredTensor:
        cpu = torch.device("cpu")
        made: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=cpu
        )
        return made

    def __init__(self, recipe: _Recipe, like: torch.Tensor) -> None:  # noqa: ARG002
        self.recipe = recipe

    @classmethod
    def stored(cls, part: StoredTensor) -> DeferredTensor:
        """The tensor as its file holds it."""
        return cls(part, torch.empty(part.shape, dtype=part.dtype, device="meta"))

    def evaluate(self) -> torch.Tensor:
        """The value, computed in blocks where that keeps memory low."""
        if isinstance(self.recipe, StoredTensor):
            return self.recipe.read()
        if self.dim() == 0 or not _comes_in_rows(self):
            return _run(self.recipe)
        whole = torch.empty(self.shape, dtype=self.dtype)
        done = 0
        for block in blocks(self):
            whole[done : done + len(block)] = block
            done += len(block)
        return whole

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredTensor({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.detach.default:  # what makes a parameter of a tensor
            return cls(args[0].recipe, args[0])
        if func in _SHORTCUTS:
            found = _SHORTCUTS[func](*args, **kwargs)
            if found is not None:
                return found
        if func._schema.is_mutable and args and isinstance(args[0], DeferredTensor):
            # It would change a copy that is forgotten.
            raise _refusal(f"{func} changes a weight in place")
        if _Mode.recording:
            return _record(func, args, kwargs)
        return func(*tree_map(_value, args), **tree_map(_value, kwargs))


def _value(x: Any) -> Any:
    return x.evaluate() if isinstance(x, DeferredTensor) else x


def _record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shaped = {k: v for k, v in kwargs.items() if k != "device"}
    try:
        like = func(*tree_map(_meta, args), **tree_map(_meta, shaped))
    except (RuntimeError, NotImplementedError) as error:
        raise _refusal(f"{func} depends on the values of a weight") from error
    if isinstance(like, torch.Tensor):
        return DeferredTensor(_Applied(func, args, kwargs, None), like)
    if isinstance(like, list | tuple) and all(isinstance(x, torch.Tensor) for x in like):
        return [DeferredTensor(_Applied(func, args, kwargs, i), x) for i, x in enumerate(like)]
    raise _refusal(f"{func} depends on the values of a weight")


def _meta(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _run(recipe: _Applied) -> torch.Tensor:
    found = recipe.function(*tree_map(_value, recipe.args), **tree_map(_value, recipe.kwargs))
    result: torch.Tensor = found if recipe.output is None else found[recipe.output]
    return result


def blocks(tensor: torch.Tensor, block_bytes: int = _BLOCK_BYTES) -> Iterator[torch.Tensor]:
    """The tensor in consecutive pieces along its first axis, each about `block_bytes` long.

    Only what a piece needs is read, if the recipe allows it. A scalar is one piece of shape [1].
    """
    if tensor.dim() == 0:
        yield _value(tensor).reshape(1)
        return
    if isinstance(tensor, DeferredTensor) and not _comes_in_rows(tensor):
        tensor = tensor.evaluate()
    row_bytes = max(1, tensor.numel() // max(1, len(tensor))) * tensor.element_size()
    step = max(1, block_bytes // row_bytes)
    for start in range(0, len(tensor), step):
        yield _rows(tensor, start, min(start + step, len(tensor)))


def stored_parts(tensor: torch.Tensor) -> Iterator[StoredTensor]:
    """The parts of files that a deferred tensor is made from; none for any other tensor."""
    if not isinstance(tensor, DeferredTensor):
        return
    if isinstance(tensor.recipe, StoredTensor):
        yield tensor.recipe
        return
    for x in tree_flatten((tensor.recipe.args, tensor.recipe.kwargs))[0]:
        if isinstance(x, torch.Tensor):
            yield from stored_parts(x)


def _rows(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of a tensor's value."""
    if not isinstance(tensor, DeferredTensor):
        return tensor[start:stop]
    if isinstance(tensor.recipe, StoredTensor):
        return tensor.recipe.read(start, stop)
    if not _comes_in_rows(tensor):
        return tensor.evaluate()[start:stop]
    return _ROWS[tensor.recipe.function](tensor.recipe, start, stop)


def _comes_in_rows(tensor: DeferredTensor) -> bool:
    recipe = tensor.recipe
    if isinstance(recipe, StoredTensor):
        return tensor.dim() > 0
    if recipe.function not in _ROWS or tensor.dim() == 0:
        return False
    if recipe.function is _aten.transpose.int:
        return not {0, -tensor.dim()} & {*recipe.args[1:3]}
    if recipe.function in (_aten.cat.default, _aten.stack.default):
        return True
    source = recipe.args[0]
    return not isinstance(source, DeferredTensor) or _comes_in_rows(source)


def _same_rows(recipe: _Applied, start: int, stop: int) -> torch.Tensor:
    # Operations that leave the first axis alone.
    part = _rows(recipe.args[0], start, stop)
    found: torch.Tensor = recipe.function(part, *recipe.args[1:], **recipe.kwargs)
    return found


def _axis(recipe: _Applied) -> int:
    return int(recipe.args[1] if len(recipe.args) > 1 else recipe.kwargs.get("dim", 0))


def _stacked_rows(recipe: _Applied, start: int, stop: int) -> torch.Tensor:
    tensors = recipe.args[0]
    axis = _axis(recipe) % (tensors[0].dim() + 1)
    if axis == 0:
        return torch.stack([_value(t) for t in tensors[start:stop]])
    return torch.stack([_rows(t, start, stop) for t in tensors], axis)


def _joined_rows(recipe: _Applied, start: int, stop: int) -> torch.Tensor:
    tensors, axis = recipe.args[0], _axis(recipe)
    if axis % tensors[0].dim() != 0:
        return torch.cat([_rows(t, start, stop) for t in tensors], axis)
    parts, offset = [], 0
    for t in tensors:
        first, last = max(start - offset, 0), min(stop - offset, len(t))
        if first < last:
            parts.append(_rows(t, first, last))
        offset += len(t)
    return torch.cat(parts)


_ROWS: dict[Any, Callable[[_Applied, int, int], torch.Tensor]] = {
    _aten._to_copy.default: _same_rows,
    _aten.alias.default: _same_rows,
    _aten.clone.default: _same_rows,
    _aten.transpose.int: _same_rows,
    _aten.stack.default: _stacked_rows,
    _aten.cat.default: _joined_rows,
}


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return all(torch.equal(x, y) for x, y in zip(blocks(a), blocks(b), strict=True))


def _embed(weight: torch.Tensor, ids: torch.Tensor, *rest: Any) -> torch.Tensor | None:
    # Only the rows that are looked up.
    if _Mode.recording or not isinstance(weight, DeferredTensor) or not _comes_in_rows(weight):
        return None
    wanted, places = torch.unique(ids, return_inverse=True)
    rows = torch.cat([_rows(weight, i, i + 1) for i in wanted.tolist()])
    found: torch.Tensor = _aten.embedding.default(rows, places, *rest)
    return found


def _select(tensor: torch.Tensor, axis: int, index: int) -> torch.Tensor | None:
    # One expert of many.
    if _Mode.recording or axis % tensor.dim() or not isinstance(tensor, DeferredTensor):
        return None
    index %= len(tensor)
    return _rows(tensor, index, index + 1)[0]


# Operations that need less than the whole value; None where they do after all.
_SHORTCUTS: dict[Any, Callable[..., Any]] = {
    _aten.equal.default: _equal,
    _aten.embedding.default: _embed,
    _aten.select.int: _select,
}


def same_value(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one: the same storage, or the same recipe. Values are not read."""
    if isinstance(a, DeferredTensor) or isinstance(b, DeferredTensor):
        return getattr(a, "recipe", None) is getattr(b, "recipe", 0)
    return a.data_ptr() == b.data_ptr()


Replaced = list[tuple[dict[str, Any], str, DeferredTensor]]


def replace_deferred(
    model: torch.nn.Module, make: Callable[[DeferredTensor], torch.Tensor]
) -> Replaced:
    """Replace every deferred parameter, a shared one by one and the same tensor.

    Returns:
        Where each one stood, for `put_back`.
    """
    made: dict[int, torch.nn.Parameter] = {}
    found: Replaced = []
    for module in model.modules():
        parameters: dict[str, Any] = module._parameters
        for name, parameter in parameters.items():
            if isinstance(parameter, DeferredTensor):
                found.append((parameters, name, parameter))
                if id(parameter) not in made:
                    made[id(parameter)] = torch.nn.Parameter(make(parameter), requires_grad=False)
    for parameters, name, parameter in found:
        parameters[name] = made[id(parameter)]
    return found


def put_back(replaced: Replaced) -> None:
    """Undo `replace_deferred`."""
    for parameters, name, parameter in replaced:
        parameters[name] = parameter


@contextmanager
def in_memory(module: torch.nn.Module) -> Iterator[None]:
    """Hold a module's weights in memory while the context lasts."""
    found = replace_deferred(module, DeferredTensor.evaluate)
    try:
        yield
    finally:
        put_back(found)
