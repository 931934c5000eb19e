"""The tensors of a LoRA adapter, each held against the layer of the model it is for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from headport.errors import CheckpointError, ExportError
from headport.export.checkpoint import some_names
from headport.export.tuning.files import AdapterFiles, AdapterName
from headport.export.tuning.lora_config import LoraConfig, lora_config

__all__ = ["LowRank", "Tuned", "find_tuned", "is_transposed"]

_PARTS = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.weight)?")
# Where PEFT puts a module that was trained as a whole, and the weight under a pair of matrices.
_WRAPPERS = re.compile(r"\.(modules_to_save(\.default)?|base_layer)(?=\.)")


@dataclass(frozen=True)
class LowRank:
    """One layer's pair of matrices: W becomes W + scaling · B A."""

    module: str
    down: torch.Tensor  # A, [r, in]
    up: torch.Tensor  # B, [out, r]
    scaling: float

    def product(self) -> torch.Tensor:
        """What is added to the weight, [out, in]; summed in float64."""
        product: torch.Tensor = self.scaling * (self.up.double() @ self.down.double())
        return product.float()

    def beside(self, layer: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's output: the definition, of which `product` is the short cut.

        Args:
            layer: The layer.
            given: Its input: [..., in], or token ids of any shape.
        """
        if isinstance(layer, torch.nn.Embedding):
            inner = torch.nn.functional.embedding(given, self.down.T)
        else:
            inner = torch.nn.functional.linear(given, self.down)
        # Gemma's embedding multiplies what it looks up, of which the pair is a part.
        factor = self.scaling * getattr(layer, "embed_scale", 1.0)
        return torch.nn.functional.linear(inner, self.up) * factor


@dataclass(frozen=True)
class Tuned(AdapterName):
    """An adapter that fits its model."""

    pairs: tuple[LowRank, ...]
    whole: dict[str, torch.Tensor] = field(default_factory=dict)  # parameters taken as they are

    def facts(self, checkpoint_sha256: str) -> dict[str, Any]:
        """For the manifest: which adapter, and what of the model it changed."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "checkpoint_sha256": checkpoint_sha256,
            "type": "LORA",
            "layers": len(self.pairs),
            "ranks": sorted({pair.down.shape[0] for pair in self.pairs}),
            "whole": sorted(self.whole),
        }


def find_tuned(files: AdapterFiles, model: torch.nn.Module) -> Tuned:
    """Hold every tensor against the model, and take stock of what is missing.

    Raises:
        CheckpointError: If a tensor is missing, has no place in the model or another size.
        ExportError: If it changes a kind of layer that is not known here.
    """
    config = lora_config(files)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in files.tensors.items():
        if match := _PARTS.fullmatch(name):
            sides.setdefault(match["module"], {})[match["side"]] = tensor
        else:
            whole[_WRAPPERS.sub("", name)] = tensor
    modules = dict(model.named_modules())
    if missing := sorted(_missing(files, modules, sides, whole)):
        raise CheckpointError(
            f"{files.name}: tensors of the adapter are missing: {', '.join(some_names(missing))}; "
            "save it again"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    homeless = [n for n in sides if n not in modules] + [n for n in whole if n not in parameters]
    if homeless:
        raise _foreign(files, model, "has no " + ", ".join(some_names(homeless)))
    pairs = tuple(_pair(files, model, config, name, found) for name, found in sides.items())
    for name, tensor in whole.items():
        if tensor.shape != parameters[name].shape:
            found, own = list(tensor.shape), list(parameters[name].shape)
            raise _foreign(files, model, f"has {name} {own}, the adapter {found}")
    return Tuned(files.name, files.sha256, pairs, whole)


def _foreign(files: AdapterFiles, model: torch.nn.Module, why: str) -> CheckpointError:
    return CheckpointError(
        f"{files.name}: the adapter is for another model ({files.base}): "
        f"{type(model).__name__} {why}; export the checkpoint that it was trained on"
    )


def _missing(
    files: AdapterFiles,
    modules: dict[str, torch.nn.Module],
    sides: dict[str, dict[str, torch.Tensor]],
    whole: dict[str, torch.Tensor],
) -> Iterator[str]:
    for module, found in sides.items():
        yield from (f"{module}.lora_{side}" for side in "AB" if side not in found)
    config = files.config
    targets = config.get("target_modules")
    if not (config.get("layers_to_transform") or config.get("exclude_modules")):
        yield from (f"{m}.lora_A" for m in modules if m not in sides and _is_target(targets, m))
    for name in config.get("modules_to_save") or ():
        for module, layer in modules.items():
            if _ends_with(module, name):
                yield from (
                    f"{module}.{part}"
                    for part, _ in layer.named_parameters()
                    if f"{module}.{part}" not in whole
                )
    if not sides and not whole:
        yield "all"


def _is_target(targets: Any, module: str) -> bool:
    if isinstance(targets, str):
        return targets != "all-linear" and re.fullmatch(targets, module) is not None
    return any(_ends_with(module, target) for target in targets or ())


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _pair(
    files: AdapterFiles,
    model: torch.nn.Module,
    config: LoraConfig,
    name: str,
    found: dict[str, torch.Tensor],
) -> LowRank:
    layer, down, up = model.get_submodule(name), found["A"], found["B"]
    rank, (outputs, inputs) = config.rank(name), _size(files, name, layer)
    expected = [rank, inputs], [outputs, rank]
    shapes = list(down.shape), list(up.shape)
    if shapes == expected:
        return LowRank(name, down, up, config.scaling(name))
    raise _foreign(
        files,
        model,
        f"needs A {expected[0]} and B {expected[1]} for {name}, the adapter has {shapes[0]} and "
        f"{shapes[1]}",
    )


def _size(files: AdapterFiles, name: str, layer: Any) -> tuple[int, int]:
    # Outputs and inputs. GPT-2's Conv1D keeps its weight as [in, out].
    match layer:
        case torch.nn.Linear():
            return layer.out_features, layer.in_features
        case torch.nn.Embedding():
            return layer.embedding_dim, layer.num_embeddings
    if is_transposed(layer):
        return layer.weight.shape[1], layer.weight.shape[0]
    raise ExportError(
        f"{files.name}: it changes {name}, a {type(layer).__name__}; Linear, Conv1D and Embedding "
        "layers are known here; merge it with PEFT's merge_and_unload, save the model and export "
        "that"
    )


def is_transposed(layer: torch.nn.Module) -> bool:
    """Whether a layer keeps its weight as [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D | torch.nn.Embedding)
