"""`genai_config.json`: how onnxruntime-genai runs a merged model.

Its session options are part of the file, so the bundle's go in: that runtime then opens the model
as headport does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headport.errors import MergeError
from headport.manifest import Manifest
from headport.merge.runtimes import cache_shape

__all__ = ["CONFIG_FILE", "genai_config", "left_out"]

CONFIG_FILE = "genai_config.json"
# Any decoder: no rule of one architecture, such as recomputing caches at a certain length, applies.
_MODEL_TYPE = "decoder"

# Field of `search` → its neutral value where the bundle's generation defaults say nothing.
_SEARCH: dict[str, Any] = {
    "do_sample": False,
    "length_penalty": 1.0,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Defaults that choose no token: a limit that every caller of genai gives itself, and a version.
_HARMLESS = ("max_length", "max_new_tokens", "transformers_version", "use_cache")


def genai_config(
    manifest: Manifest, config: Mapping[str, Any], file: str, vocab_size: int
) -> dict[str, Any]:
    """The configuration of a merged model.

    Args:
        manifest: The bundle's.
        config: Its `config.json`, for token ids that the generation defaults do not name.
        file: Name of the merged model's file.
        vocab_size: Logits per row, V.

    Raises:
        MergeError: If neither names an end-of-text token; the runtime does not run without one.
    """
    shape, model = cache_shape(manifest), manifest.model
    tokens = {name: _token(manifest.defaults, config, name) for name in _TOKENS}
    if tokens["eos_token_id"] is None:
        raise MergeError(
            "onnxruntime-genai stops at an end-of-text token, and neither generation_config nor "
            "config.json names one as eos_token_id; add it to the checkpoint and export again"
        )
    if tokens["pad_token_id"] is None:
        eos = tokens["eos_token_id"]
        tokens["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
    in_place = manifest.target != "portable"
    search = {name: manifest.defaults.get(name, value) for name, value in _SEARCH.items()}
    return {
        "model": {
            **{name: value for name, value in tokens.items() if value is not None},
            "context_length": model.max_context,
            "decoder": {
                "session_options": {
                    "log_id": "onnxruntime-genai",
                    "graph_optimization_level": "ORT_ENABLE_ALL",
                    **manifest.session_options,
                    "provider_options": [],
                },
                "filename": file,
                "head_size": shape.size,
                "hidden_size": model.hidden_size,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": model.query_heads or shape.heads,
                "num_hidden_layers": _layers(manifest),
                "num_key_value_heads": shape.heads,
            },
            "type": _MODEL_TYPE,
            "vocab_size": vocab_size,
        },
        "search": {
            **search,
            "early_stopping": True,
            "max_length": model.max_context,
            "past_present_share_buffer": in_place,
        },
    }


def left_out(manifest: Manifest) -> list[str]:
    """Generation defaults of the bundle that this configuration has no field for, by name."""
    known = {*_SEARCH, *_TOKENS, *_HARMLESS, "early_stopping"}
    return sorted(name for name, value in manifest.defaults.items() if value and name not in known)


def _token(defaults: Mapping[str, Any], config: Mapping[str, Any], name: str) -> Any:
    found = defaults.get(name)
    return config.get(name) if found is None else found


def _layers(manifest: Manifest) -> int:
    return sum(p.name.endswith(".key") for p in manifest.backbone.inputs)
