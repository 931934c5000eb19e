"""The folder of a PEFT adapter: `adapter_config.json` and `adapter_model.safetensors`.

Read here and not by PEFT: applying it is two matrix products, and a checkpoint's exporter should
not need another library whose versions follow transformers'. Imports torch only, so that the
validating process can use it too.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from headport.errors import CheckpointError
from headport.export.checkpoint import some_names

__all__ = ["AdapterFiles", "AdapterName", "adapter_sha256", "read_adapter"]

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."  # PEFT wraps the model twice


@dataclass(frozen=True)
class AdapterName:
    """Which adapter."""

    name: str  # of the folder
    sha256: str

    def origin(self, checkpoint: str, sha256: str) -> tuple[str, str]:
        """Name and hash of the model with the adapter, from those of the model alone."""
        both = hashlib.sha256(f"{sha256} {self.sha256}".encode()).hexdigest()
        return f"{checkpoint} + {self.name}", both


@dataclass(frozen=True)
class AdapterFiles(AdapterName):
    """What lies in an adapter's folder."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]  # float32, named as in the model they are for

    @property
    def base(self) -> str:
        """The model it says it was trained for: a hint for messages, sizes and names decide."""
        named = self.config.get("base_model_name_or_path")
        return Path(named).name if isinstance(named, str) and named else "an unnamed model"


def read_adapter(folder: Path) -> AdapterFiles:
    """Read an adapter.

    Args:
        folder: As PEFT's `save_pretrained` writes it.

    Raises:
        CheckpointError: If a file is missing, not what it should be, or holds NaN or infinity.
    """
    sha256 = adapter_sha256(folder)
    try:
        config = json.loads((folder / _CONFIG).read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{folder / _CONFIG}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / _CONFIG}: an object was expected")
    try:
        stored = load_file(folder / _WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / _WEIGHTS}: cannot be read ({error})") from error
    tensors = {name.removeprefix(_PREFIX): tensor.float() for name, tensor in stored.items()}
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise CheckpointError(
            f"{folder.name}: tensors of the adapter hold NaN or infinity: "
            f"{', '.join(some_names(broken))}"
        )
    return AdapterFiles(folder.resolve().name, sha256, config, tensors)


def adapter_sha256(folder: Path) -> str:
    """sha256 over the configuration and the weights: the same weights scaled otherwise differ.

    Raises:
        CheckpointError: If one of the two files is missing.
    """
    digest = hashlib.sha256()
    for name in (_CONFIG, _WEIGHTS):
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{folder}: {_missing(folder, name)}")
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _missing(folder: Path, name: str) -> str:
    if name == _WEIGHTS and (folder / _PICKLED).is_file():
        return (
            f"only {_PICKLED} in it, a pickled file, which can run code when it is loaded; load "
            "the adapter with PEFT and save it again with safe_serialization=True"
        )
    return f"no {name} in it; the folder that PEFT's save_pretrained wrote was expected"
