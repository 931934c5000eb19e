"""A checkpoint on disk: found, hashed, and loaded by transformers, with its gaps made errors.

Imports torch and transformers only, so that the validating process can use it too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from headport.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "checkpoint_sha256",
    "find_checkpoint",
    "first_line",
    "load_model",
    "load_tokenizer",
    "quiet_libraries",
    "run_reference",
]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """Where a checkpoint lies. `folder` holds the tokenizer and configuration of either format."""

    folder: Path
    format: Literal["safetensors", "gguf"]
    weight_files: tuple[Path, ...]  # in the order in which they are hashed

    @property
    def name(self) -> str:
        """Base name only: what is written must not tell the machine's folders."""
        return self.weight_files[0].name if self.format == "gguf" else self.folder.resolve().name

    @property
    def gguf_file(self) -> str | None:
        """The `gguf_file` argument of transformers' loaders."""
        return self.weight_files[0].name if self.format == "gguf" else None


def find_checkpoint(model: str) -> Checkpoint:
    """Find the weights of a checkpoint.

    Args:
        model: A Hugging Face folder with safetensors, or a `.gguf` file.

    Raises:
        CheckpointError: If nothing is there, or it holds no weights that can be read safely.
    """
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        return Checkpoint(path.parent, "gguf", (path,))
    if not path.is_dir():
        found = "another kind of file" if path.is_file() else "nothing"
        raise CheckpointError(
            f"{model}: a Hugging Face folder or a .gguf file was expected, {found} is there"
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{model}: no config.json in it, so it is not a checkpoint")
    return Checkpoint(path, "safetensors", _weight_files(path))


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if (folder / _INDEX).is_file():
        try:
            names = set(json.loads((folder / _INDEX).read_text("utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{folder / _INDEX}: not a safetensors index") from error
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            raise CheckpointError(f"{folder}: shards are missing: {', '.join(missing)}")
        return tuple(folder / name for name in sorted(names))
    if (folder / _SINGLE).is_file():
        return (folder / _SINGLE,)
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise CheckpointError(
            f"{folder}: only pickled weights found, which can run code when they are loaded; "
            "save the model again with safe_serialization=True"
        )
    raise CheckpointError(f"{folder}: no weights in it ({_SINGLE} or {_INDEX} was expected)")


def checkpoint_sha256(checkpoint: Checkpoint) -> str:
    """sha256 over the weight files, one after the other in the order of their names."""
    digest = hashlib.sha256()
    for file in checkpoint.weight_files:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the loaders' and exporters' own log lines, warnings and bars off the terminal."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    disabled = logging.root.manager.disable
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


@contextmanager
def _no_gguf_bar() -> Iterator[None]:
    # The GGUF reader shows a bar of its own, which transformers' switch does not reach.
    from transformers import modeling_gguf_pytorch_utils as reader

    shown = reader.tqdm
    reader.tqdm = partial(shown, disable=True)
    try:
        yield
    finally:
        reader.tqdm = shown


def load_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Any:
    """Load the causal language model, untouched, on CPU, in evaluation mode.

    Returns:
        A transformers `PreTrainedModel` whose every weight came from the checkpoint.

    Raises:
        CheckpointError: If the checkpoint is no causal language model that transformers knows,
            does not load, leaves weights unset or unused, or holds a non-finite weight.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    extra: dict[str, Any] = {}
    if checkpoint.gguf_file:
        # Without `dequantize`, the model stays tied to its quantised form.
        extra = {
            "gguf_file": checkpoint.gguf_file,
            "quantization_config": GgufConfig(dequantize=True),
        }
    else:
        _check_architecture(checkpoint)
    with quiet_libraries(), _no_gguf_bar():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                checkpoint.folder,
                dtype=dtype,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **extra,
            )
        except Exception as error:  # transformers raises many kinds for a broken checkpoint
            raise CheckpointError(
                f"{checkpoint.name}: transformers cannot load it: {first_line(error)}"
            ) from error
    _check_keys(checkpoint, info)
    _check_finite(checkpoint, model)
    return model.eval()


def first_line(error: BaseException) -> str:
    """What an error of another library says, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def run_reference(model: Any, **inputs: Any) -> Any:
    """Run the PyTorch model; returns its output.

    Raises:
        CheckpointError: If the model fails on plain input, as with an inconsistent configuration.
    """
    with torch.no_grad(), quiet_libraries():
        try:
            return model(**inputs)
        except Exception as error:  # model code raises many kinds
            raise CheckpointError(
                f"{type(model).__name__}: PyTorch itself cannot run it: {first_line(error)}"
            ) from error


def _check_architecture(checkpoint: Checkpoint) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    with quiet_libraries():
        try:
            config = AutoConfig.from_pretrained(
                checkpoint.folder, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # an unknown model_type, broken JSON, or a need for its own code
            raise CheckpointError(
                f"{checkpoint.name}: its config.json cannot be used: {first_line(error)}"
            ) from error
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, ())
    expected = (known,) if isinstance(known, str) else tuple(known)
    declared = tuple(config.architectures or ())
    if config.is_encoder_decoder or not expected:
        raise CheckpointError(
            f"{checkpoint.name}: a causal language model was expected, "
            f"found {', '.join(declared) or config.model_type}"
        )
    if declared and not set(declared) & set(expected):
        raise CheckpointError(
            f"{checkpoint.name}: a causal language model ({' or '.join(expected)}) was expected, "
            f"its config names {', '.join(declared)}"
        )


def _check_keys(checkpoint: Checkpoint, info: Any) -> None:
    faults = [
        f"{word}: {', '.join(_names(found))}"
        for word, found in (
            ("weights the model needs but the checkpoint lacks", info["missing_keys"]),
            ("weights the model has no place for", info["unexpected_keys"]),
            ("weights of another shape", info["mismatched_keys"]),
            ("errors", info.get("error_msgs") or ()),
        )
        if found
    ]
    if faults:
        raise CheckpointError(f"{checkpoint.name}: does not fit its model; {'; '.join(faults)}")


def _names(found: Any, limit: int = 5) -> list[str]:
    names = sorted(str(item[0] if isinstance(item, tuple) else item) for item in found)
    return names if len(names) <= limit else [*names[:limit], f"and {len(names) - limit} more"]


def _check_finite(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    broken = []
    for name, parameter in model.named_parameters():
        low, high = torch.aminmax(parameter.detach())  # NaN comes through both
        if not (torch.isfinite(low) and torch.isfinite(high)):
            broken.append(name)
    if broken:
        raise CheckpointError(
            f"{checkpoint.name}: weights hold NaN or infinity: {', '.join(_names(broken))}"
        )


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Load the checkpoint's tokenizer.

    Returns:
        A transformers tokenizer with a `tokenizers` backend.

    Raises:
        CheckpointError: If there is none, or it has no form that runs without transformers.
    """
    from transformers import AutoTokenizer

    extra = {"gguf_file": checkpoint.gguf_file} if checkpoint.gguf_file else {}
    with quiet_libraries():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                checkpoint.folder, trust_remote_code=False, local_files_only=True, **extra
            )
        except Exception as error:  # transformers raises many kinds for a missing tokenizer
            raise CheckpointError(
                f"{checkpoint.name}: no tokenizer that transformers can load: {first_line(error)}"
            ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"{checkpoint.name}: its tokenizer ({type(tokenizer).__name__}) has no tokenizer.json "
            "form; convert it with transformers and save it beside the weights"
        )
    if not len(tokenizer):
        raise CheckpointError(f"{checkpoint.name}: its tokenizer knows no token")
    return tokenizer
