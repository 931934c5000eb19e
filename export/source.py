"""Where a model comes from: a folder, a GGUF file, or a Python function; found and hashed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from headport.errors import CheckpointError

__all__ = ["Checkpoint", "checkpoint_sha256", "find_checkpoint", "is_factory"]

# One file, or the index of several, in the order of preference; transformers' own names.
_SAFETENSORS = ("model.safetensors.index.json", "model.safetensors")
_PICKLED = ("pytorch_model.bin.index.json", "pytorch_model.bin")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """Where a checkpoint lies. `folder` holds the tokenizer and configuration of any format."""

    folder: Path
    format: Literal["safetensors", "gguf", "pickle", "python"]
    weight_files: tuple[Path, ...]  # in the order in which they are hashed
    trust_remote_code: bool = False  # code that the checkpoint brings may run
    factory: str | None = None  # `module:function` that makes the model
    allow_pickle: bool = False  # pickled tensors may be read, by the weights-only unpickler

    @property
    def name(self) -> str:
        """Base name only: what is written must not tell the machine's folders."""
        if self.factory is not None:
            return self.factory
        return self.weight_files[0].name if self.format == "gguf" else self.folder.resolve().name

    @property
    def gguf_file(self) -> str | None:
        """The `gguf_file` argument of transformers' loaders."""
        return self.weight_files[0].name if self.format == "gguf" else None


def is_factory(model: str) -> bool:
    """Whether this names a Python function, as in `package.module:function`."""
    return _FACTORY.fullmatch(model) is not None and not Path(model).exists()


def find_checkpoint(
    model: str, *, trust_remote_code: bool = False, allow_pickle: bool = False
) -> Checkpoint:
    """Find the weights of a checkpoint.

    Args:
        model: A Hugging Face folder with safetensors, a `.gguf` file, or `module:function`.
        trust_remote_code: Let code that the folder brings run.
        allow_pickle: Accept `pytorch_model.bin`, read by torch's weights-only unpickler.

    Raises:
        CheckpointError: If nothing is there, or it holds no weights that can be read safely.
    """
    path = Path(model)
    if is_factory(model):
        from headport.export.own_model import own_model

        tokenizer = own_model(model).tokenizer
        return Checkpoint(tokenizer, "python", (), factory=model, allow_pickle=allow_pickle)
    if path.is_file() and path.suffix == ".gguf":
        return Checkpoint(path.parent, "gguf", (path,), allow_pickle=allow_pickle)
    if path.is_file() and any(path.match(pattern) for pattern in _PICKLES):
        raise CheckpointError(
            f"{model}: a pickled file; give the Hugging Face folder it lies in, and see "
            "--allow-pickle"
        )
    if not path.is_dir():
        found = "another kind of file" if path.is_file() else "nothing"
        raise CheckpointError(
            f"{model}: a Hugging Face folder, a .gguf file or module:function was expected, "
            f"{found} is there"
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{model}: no config.json in it, so it is not a checkpoint")
    if files := _weight_files(path, _SAFETENSORS):
        return Checkpoint(path, "safetensors", files, trust_remote_code, allow_pickle=allow_pickle)
    if not any(next(path.glob(pattern), None) for pattern in _PICKLES):
        raise CheckpointError(
            f"{model}: no weights in it ({' or '.join(reversed(_SAFETENSORS))} was expected)"
        )
    if not allow_pickle:
        raise CheckpointError(
            f"{model}: only pickled weights found, which can run code when they are loaded; save "
            "the model again with safe_serialization=True, or pass --allow-pickle to read them "
            "with torch's weights-only unpickler"
        )
    if files := _weight_files(path, _PICKLED):
        return Checkpoint(path, "pickle", files, trust_remote_code, allow_pickle=True)
    raise CheckpointError(
        f"{model}: pickled weights under another name than {' or '.join(reversed(_PICKLED))}, "
        "which transformers does not look for"
    )


def _weight_files(folder: Path, names: tuple[str, str]) -> tuple[Path, ...]:
    index, single = (folder / name for name in names)
    if not index.is_file():
        return (single,) if single.is_file() else ()
    try:
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index}: not an index of weight files") from error
    missing = sorted(name for name in shards if not (folder / name).is_file())
    if missing:
        raise CheckpointError(f"{folder}: shards are missing: {', '.join(missing)}")
    return tuple(folder / name for name in sorted(shards))


def checkpoint_sha256(checkpoint: Checkpoint) -> str:
    """sha256 over the weight files, one after the other in the order of their names.

    A model that a function makes is hashed by its parameters and buffers, in the order in which it
    names them.
    """
    digest = hashlib.sha256()
    for chunk in _own_bytes(checkpoint.factory) if checkpoint.factory else _file_bytes(checkpoint):
        digest.update(chunk)
    return digest.hexdigest()


def _file_bytes(checkpoint: Checkpoint) -> Iterator[bytes]:
    for file in checkpoint.weight_files:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk


def _own_bytes(factory: str) -> Iterator[memoryview]:
    from headport.export.own_model import own_model

    for tensor in own_model(factory).module.state_dict().values():
        yield memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
