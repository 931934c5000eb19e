"""What a checkpoint's `generation_config` may say, field by field.

Three tables say what becomes of each field of transformers 5.24: it is used, it cannot change a
token of this runtime, or it can and must then have its neutral value. A field in no table is
refused too: newer releases add fields, and one that is ignored in silence changes the answers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from headport.errors import BundleError, RequestError
from headport.runtime.limits import check

__all__ = ["Defaults", "read_defaults"]

USED = frozenset(
    {
        "do_sample",
        "eos_token_id",
        "max_length",
        "max_new_tokens",
        "min_p",
        "stop_strings",
        "temperature",
        "top_k",
        "top_p",
    }
)

_OPTION = {"stop_strings": "stop"}  # fields whose option has another name

# Neutral values besides null; any other value changes tokens and is not supported.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "custom_generate": (),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0.0,),
    "repetition_penalty": (1.0,),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1.0,),
    "watermarking_config": (),
}

# These choose what is returned, how fast it is computed, or belong to beams, encoders and
# assistants, which do not exist where the fields above are neutral.
IGNORED = frozenset(
    {
        "_commit_hash",
        "_from_model_config",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "continuous_batching_config",
        "decoder_start_token_id",
        "disable_compile",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "is_assistant",
        "length_penalty",
        "low_memory",
        "max_cache_len",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "remove_invalid_values",  # a row that is not finite raises, with it or without
        "renormalize_logits",  # adds the same number to every logit of a row
        "return_dict_in_generate",
        "speculation_type",
        "target_lookbehind",
        "transformers_version",
        "use_cache",
        "use_mtp",
    }
)


@dataclass(frozen=True)
class Defaults:
    """What holds where a call says nothing."""

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int | None = None
    max_length: int | None = None  # prompt and new tokens together
    eos_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


def read_defaults(fields: Mapping[str, Any], ignore: Collection[str] = ()) -> Defaults:
    """Read a bundle's generation defaults.

    Args:
        fields: As the manifest holds them.
        ignore: Fields that the caller wants left out, supported or not.

    Raises:
        BundleError: Naming every field that would change tokens and is not supported, or is out
            of range.
    """
    given = {k: v for k, v in fields.items() if v is not None and k not in ignore}
    refused = sorted(name for name, value in given.items() if _changes_tokens(name, value))
    if refused:
        values = ", ".join(f"{name}={given[name]!r}" for name in refused)
        raise BundleError(
            f"the bundle's generation_config asks for {values}, which this runtime does not "
            f"support and which may change the tokens; to run without, ignore "
            f"{'it' if len(refused) == 1 else 'them'} by name: ignore={tuple(refused)!r}"
        )
    used = {_OPTION.get(k, k): v for k, v in given.items() if k in USED and k != "do_sample"}
    try:
        check(used)
    except RequestError as error:
        raise BundleError(f"the bundle's generation_config is wrong: {error}") from error
    return Defaults(
        temperature=used.get("temperature", 1.0) if given.get("do_sample") else 0.0,
        top_k=used.get("top_k", 0),
        top_p=used.get("top_p", 1.0),
        min_p=used.get("min_p", 0.0),
        max_new_tokens=used.get("max_new_tokens"),
        max_length=used.get("max_length"),
        eos_token_ids=_several(used.get("eos_token_id", ())),
        stop=_several(used.get("stop", ())),
    )


def _changes_tokens(name: str, value: Any) -> bool:
    if name in USED or name in IGNORED:
        return False
    return name not in NEUTRAL or value not in NEUTRAL[name]


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
