"""A checkpoint loaded by transformers, with its gaps made errors.

Imports torch and transformers only, so that the validating process can use it too.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch

from headport.errors import CheckpointError
from headport.export.source import Checkpoint, checkpoint_sha256, find_checkpoint

__all__ = [
    "SOURCED",
    "VALUE_HEAD_PREFIX",
    "Checkpoint",
    "ModelKind",
    "check_finite",
    "checkpoint_kind",
    "checkpoint_sha256",
    "find_checkpoint",
    "first_line",
    "load_model",
    "load_pretrained",
    "load_tokenizer",
    "quiet_libraries",
    "run_reference",
    "some_names",
]

ModelKind = Literal["causal", "text-to-text", "speech-to-text", "sequence", "token", "masked"]
# Kind → transformers' loader, and its table of architectures by model type.
_LOADERS: dict[ModelKind, tuple[str, str]] = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    # Before the masked ones, which some of these count among as well.
    "text-to-text": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "speech-to-text": (
        "AutoModelForSpeechSeq2Seq",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    ),
    "sequence": (
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "token": ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
}
SOURCED: frozenset[ModelKind] = frozenset({"text-to-text", "speech-to-text"})
VALUE_HEAD_PREFIX = "v_head."  # TRL's, beside a language model's weights; exported as a head


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


def checkpoint_kind(checkpoint: Checkpoint) -> ModelKind:
    """What the config says the model is; causal where it says nothing that is known."""
    if checkpoint.factory or checkpoint.gguf_file:
        return "causal"
    from transformers.models.auto import modeling_auto

    try:
        config = json.loads((checkpoint.folder / "config.json").read_text("utf-8"))
        declared = set(config.get("architectures") or ())
    except (ValueError, AttributeError, TypeError):  # what is wrong with it, loading says
        return "causal"
    for kind, (_, table) in _LOADERS.items():
        known = getattr(modeling_auto, table).get(config.get("model_type"), ())
        found = declared & ({known} if isinstance(known, str) else set(known))
        # The table of masked models also names encoder-decoders that were trained like them.
        if found and (kind != "masked" or any(name.endswith("ForMaskedLM") for name in found)):
            return kind
    return "causal"


def load_model(
    checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, kind: ModelKind = "causal"
) -> Any:
    """Load the model as a whole, untouched, on CPU, in evaluation mode.

    Args:
        checkpoint: The checkpoint.
        dtype: Precision of the weights.
        kind: What is expected of it: a causal language model, or what `checkpoint_kind` says.

    Returns:
        A transformers `PreTrainedModel`, or what stands in for one around a user's own module;
        every weight came from the checkpoint.

    Raises:
        CheckpointError: If the checkpoint is no model of this kind that transformers knows,
            does not load, leaves weights unset or unused, or holds a non-finite weight.
    """
    if checkpoint.factory:
        from headport.export.own_model import own_model

        model = own_model(checkpoint.factory).wrapped().to(dtype)
    else:
        model = load_pretrained(checkpoint, dtype, kind)
    check_finite(checkpoint, model)
    return model.eval()


def load_pretrained(checkpoint: Checkpoint, dtype: torch.dtype, kind: ModelKind = "causal") -> Any:
    """Load by transformers; every weight has its place, values are not looked at.

    Raises:
        CheckpointError: As `load_model`, but for non-finite weights.
    """
    import transformers

    loader = getattr(transformers, _LOADERS[kind][0])
    extra: dict[str, Any] = {}
    if checkpoint.gguf_file:
        # Without `dequantize`, the model stays tied to its quantised form.
        extra = {
            "gguf_file": checkpoint.gguf_file,
            "quantization_config": transformers.GgufConfig(dequantize=True),
        }
    elif kind == "causal":
        _check_architecture(checkpoint)
    with quiet_libraries(), _no_gguf_bar():
        try:
            model, info = loader.from_pretrained(
                checkpoint.folder,
                dtype=dtype,
                trust_remote_code=checkpoint.trust_remote_code,
                local_files_only=True,
                use_safetensors=checkpoint.format != "pickle",
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                **extra,
            )
        except CheckpointError:
            raise
        except Exception as error:  # transformers raises many kinds for a broken checkpoint
            raise CheckpointError(
                f"{checkpoint.name}: transformers cannot load it: {first_line(error)}"
            ) from error
    _check_keys(checkpoint, info)
    return model


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
                checkpoint.folder,
                trust_remote_code=checkpoint.trust_remote_code,
                local_files_only=True,
            )
        except Exception as error:  # an unknown model_type, broken JSON, or a need for its own code
            if _brings_code(checkpoint):
                raise CheckpointError(
                    f"{checkpoint.name}: it needs Python code of its own, which is not run; read "
                    "that code, and pass --trust-remote-code if you trust it"
                ) from error
            raise CheckpointError(
                f"{checkpoint.name}: its config.json cannot be used: {first_line(error)}"
            ) from error
    if checkpoint.trust_remote_code and "AutoModelForCausalLM" in _own_classes(config):
        return
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


def _brings_code(checkpoint: Checkpoint) -> bool:
    try:
        config = json.loads((checkpoint.folder / "config.json").read_text("utf-8"))
    except ValueError:
        return False
    return isinstance(config, dict) and bool(config.get("auto_map"))


def _own_classes(config: Any) -> dict[str, Any]:
    return getattr(config, "auto_map", None) or {}


def _check_keys(checkpoint: Checkpoint, info: Any) -> None:
    unexpected = [n for n in info["unexpected_keys"] if not n.startswith(VALUE_HEAD_PREFIX)]
    faults = [
        f"{word}: {', '.join(some_names(found))}"
        for word, found in (
            ("weights the model needs but the checkpoint lacks", info["missing_keys"]),
            ("weights the model has no place for", unexpected),
            ("weights of another shape", info["mismatched_keys"]),
            ("errors", info.get("error_msgs") or ()),
        )
        if found
    ]
    if faults:
        raise CheckpointError(f"{checkpoint.name}: does not fit its model; {'; '.join(faults)}")


def some_names(found: Any, limit: int = 5) -> list[str]:
    """The first few of many names, for a message."""
    names = sorted(str(item[0] if isinstance(item, tuple) else item) for item in found)
    return names if len(names) <= limit else [*names[:limit], f"and {len(names) - limit} more"]


def _whole(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    return (tensor,)


def check_finite(
    checkpoint: Checkpoint,
    model: torch.nn.Module,
    pieces: Callable[[torch.Tensor], Iterable[torch.Tensor]] = _whole,
) -> None:
    """Raise `CheckpointError` naming the weights that hold NaN or infinity.

    Args:
        checkpoint: Named in the message.
        model: Its parameters are looked at, piece by piece.
        pieces: Cuts a parameter.
    """
    broken = []
    for name, parameter in model.named_parameters():
        for piece in pieces(parameter.detach()):
            low, high = torch.aminmax(piece)  # NaN comes through both
            if not (torch.isfinite(low) and torch.isfinite(high)):
                broken.append(name)
                break
    if broken:
        raise CheckpointError(
            f"{checkpoint.name}: weights hold NaN or infinity: {', '.join(some_names(broken))}"
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
                checkpoint.folder,
                trust_remote_code=checkpoint.trust_remote_code,
                local_files_only=True,
                **extra,
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
