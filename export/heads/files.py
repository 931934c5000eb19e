"""A head in a file: safetensors, with what kind of head it is in the file's metadata.

Files that other libraries wrote are known by the names of their tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from headport.errors import CheckpointError, UsageError
from headport.export.heads.modules import MultiTaskHead, TreeSoftmax, ValueHead, VocabularyHead

__all__ = ["HeadModule", "load_head", "read_tensors", "save_head", "value_head_from_tensors"]

HeadModule = (
    ValueHead | MultiTaskHead | VocabularyHead | TreeSoftmax | nn.AdaptiveLogSoftmaxWithLoss
)
Tensors = Mapping[str, torch.Tensor]

_KEY = "headport.head"
_PICKLES = (".bin", ".pt", ".pth")


@dataclass(frozen=True)
class _Kind:
    """How one kind of head is written, and made again from its tensors."""

    module: type[nn.Module]
    config: Callable[[Any], dict[str, Any]]
    build: Callable[[Tensors, dict[str, Any]], nn.Module]


def _own_config(module: Any) -> dict[str, Any]:
    found: dict[str, Any] = module.config
    return found


def _value(tensors: Tensors, config: dict[str, Any]) -> nn.Module:
    inner = tensors.get("inner.linear.weight")
    hidden = tensors["summary.weight"] if inner is None else inner
    return ValueHead(
        hidden.shape[1],
        inner_size=0 if inner is None else len(inner),
        bias="summary.bias" in tensors,
        **config,
    )


def _tasks(tensors: Tensors, config: dict[str, Any]) -> nn.Module:
    shared = tensors.get("shared.linear.weight")
    first = next(iter(config["tasks"]))
    hidden = tensors[f"tasks.{first}.weight"] if shared is None else shared
    return MultiTaskHead(hidden.shape[1], inner_size=0 if shared is None else len(shared), **config)


def _vocabulary(tensors: Tensors, config: dict[str, Any]) -> nn.Module:
    del config
    V, H = tensors["output.weight"].shape
    blocks = sum(name.startswith("blocks.") and name.endswith(".weight") for name in tensors)
    return VocabularyHead(H, V, blocks=blocks, bias="output.bias" in tensors)


def _adaptive_config(module: Any) -> dict[str, Any]:
    return {"cutoffs": module.cutoffs[:-1], "div_value": module.div_value}


def _adaptive(tensors: Tensors, config: dict[str, Any]) -> nn.Module:
    rows, H = tensors["head.weight"].shape
    cutoffs = config["cutoffs"]
    if cutoffs != sorted(set(cutoffs)):
        raise UsageError(f"cutoffs in ascending order were expected, {cutoffs} were found")
    tails = [
        w for name, w in tensors.items() if name.startswith("tail.") and name.endswith(".1.weight")
    ]
    size = rows - len(cutoffs) + sum(len(weight) for weight in tails)
    return nn.AdaptiveLogSoftmaxWithLoss(
        H, size, cutoffs, div_value=config["div_value"], head_bias="head.bias" in tensors
    )


def _tree(tensors: Tensors, config: dict[str, Any]) -> nn.Module:
    del config
    class_of = torch.empty_like(tensors["order"])
    classes = torch.arange(len(tensors["sizes"]))
    class_of[tensors["order"]] = classes.repeat_interleave(tensors["sizes"])
    return TreeSoftmax(tensors["classes.weight"].shape[1], class_of)


_KINDS: dict[str, _Kind] = {
    "value": _Kind(ValueHead, _own_config, _value),
    "tasks": _Kind(MultiTaskHead, _own_config, _tasks),
    "vocabulary": _Kind(VocabularyHead, _own_config, _vocabulary),
    "adaptive": _Kind(nn.AdaptiveLogSoftmaxWithLoss, _adaptive_config, _adaptive),
    "tree": _Kind(TreeSoftmax, _own_config, _tree),
}


def save_head(module: nn.Module, path: str | Path) -> None:
    """Save a head, so that `headport export --head NAME=PATH` finds what it needs.

    Args:
        module: One of `headport.export.heads`, or `torch.nn.AdaptiveLogSoftmaxWithLoss`.
        path: A `.safetensors` file.

    Raises:
        UsageError: If it is a module of another class.
    """
    for name, kind in _KINDS.items():
        if type(module) is kind.module:
            document = {"kind": name, "config": kind.config(module)}
            tensors = {n: t.detach().contiguous() for n, t in module.state_dict().items()}
            save_file(tensors, path, metadata={_KEY: json.dumps(document)})
            return
    known = ", ".join(kind.module.__name__ for kind in _KINDS.values())
    raise UsageError(f"a head of class {known} was expected, found {type(module).__name__}")


def load_head(path: str | Path, *, allow_pickle: bool = False) -> HeadModule:
    """Load a head from a file that `save_head` or another library wrote.

    Args:
        path: safetensors, or a pickled file of tensors.
        allow_pickle: Accept the latter, read by torch's weights-only unpickler.

    Raises:
        CheckpointError: If the file cannot be read, holds no head that is known, or its tensors do
            not fit together.
    """
    file = Path(path)
    tensors, metadata = read_tensors(file, allow_pickle=allow_pickle)
    if _KEY not in metadata:
        found = value_head_from_tensors(tensors)
        if found is None:
            raise CheckpointError(
                f"{file}: a head saved by headport.export.heads.save_head, or v_head.* tensors, "
                f"were expected, found {', '.join(sorted(tensors)[:4]) or 'no tensor'}"
            )
        return found
    try:
        document = json.loads(metadata[_KEY])
        kind = _KINDS[document["kind"]]
        module = kind.build(tensors, document["config"])
        module.load_state_dict(dict(tensors))
    except UsageError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{file}: its tensors are not those of the head its metadata names ({first}); save it "
            "again with save_head"
        ) from error
    return module.eval()  # type: ignore[return-value]


def read_tensors(
    file: Path, *, allow_pickle: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors of a file in float32 where they are floating-point, and its metadata.

    Raises:
        CheckpointError: If it is not there, cannot be read, or is pickled and that is not allowed.
    """
    if not file.is_file():
        raise CheckpointError(f"{file}: a file with a head was expected, nothing is there")
    metadata: dict[str, str] = {}
    try:
        if file.suffix in _PICKLES:
            if not allow_pickle:
                raise CheckpointError(
                    f"{file}: a pickled file, which can run code when it is loaded; save it as "
                    "safetensors, or pass --allow-pickle to read it with torch's weights-only "
                    "unpickler"
                )
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        else:
            with safe_open(file, "pt") as stream:
                metadata = stream.metadata() or {}
                tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(t, torch.Tensor) for t in tensors.values()
    ):
        raise CheckpointError(f"{file}: tensors by name were expected")
    return {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}, metadata


# A value head in other libraries, by the prefix of its layer: `summary` in TRL and LLaMA-Factory,
# bare in DeepSpeed-Chat.
_VALUE_LAYOUTS = ("v_head.summary.", "v_head.")


def value_head_from_tensors(tensors: Tensors) -> ValueHead | None:
    """The value head among a checkpoint's tensors; None if there is none.

    Raises:
        CheckpointError: If there are `v_head.` tensors, but not those of one linear layer.
    """
    own = {name: t for name, t in tensors.items() if name.startswith("v_head.")}
    if not own:
        return None
    for prefix in _VALUE_LAYOUTS:
        weight, bias = own.get(f"{prefix}weight"), own.get(f"{prefix}bias")
        known = {f"{prefix}weight", f"{prefix}bias"}
        if weight is not None and weight.dim() == 2 and len(weight) == 1 and own.keys() <= known:
            head = ValueHead(weight.shape[1], bias=bias is not None)
            with torch.no_grad():
                head.summary.weight.copy_(weight)
                if bias is not None:
                    head.summary.bias.copy_(bias)
            return head.eval()
    raise CheckpointError(
        "a value head of one linear layer (v_head.summary.weight [1, hidden size]) was expected, "
        f"found {', '.join(f'{name} {list(t.shape)}' for name, t in sorted(own.items()))}"
    )
