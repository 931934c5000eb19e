"""What a checkpoint's `generation_config` may say, field by field.

Three tables say what becomes of each field of transformers 5.24: it is used, it cannot change a
token of this runtime, or it can and must then have its neutral value. A field in no table is
refused too: newer releases add fields, and one that is ignored in silence changes the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as records
from typing import Any

from headport.errors import BundleError, RequestError
from headport.runtime.limits import check
from headport.runtime.sampling.settings import Beams, Sampling, read_bias

__all__ = ["Defaults", "read_defaults"]

USED = frozenset(
    {
        "bad_words_ids",
        "begin_suppress_tokens",
        "do_sample",
        "early_stopping",
        "eos_token_id",
        "epsilon_cutoff",
        "eta_cutoff",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "frequency_penalty",  # this one and presence_penalty are written by other toolkits
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_beams",
        "num_return_sequences",
        "presence_penalty",
        "repetition_penalty",
        "sequence_bias",
        "stop_strings",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)

# Fields whose option has another name.
_OPTION = {
    "bad_words_ids": "bad_words",
    "forced_bos_token_id": "forced_bos",
    "forced_eos_token_id": "forced_eos",
    "num_return_sequences": "n",
    "sequence_bias": "logit_bias",
    "stop_strings": "stop",
}

# Neutral values besides null; any other value changes tokens and is not supported.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "constraints": ([],),
    "custom_generate": (),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),  # of the prompt, where a model has no encoder
    "encoder_repetition_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "guidance_scale": (1.0,),
    "max_time": (),
    "num_beam_groups": (1,),
    "penalty_alpha": (0.0,),
    "token_healing": (False,),
    "top_h": (),
    "watermarking_config": (),
}

# These choose what is returned, how fast it is computed, or belong to encoders and assistants,
# which do not exist where the fields above are neutral.
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
        "is_assistant",
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

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    max_length: int | None = None  # prompt and new tokens together
    eos_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    n: int = 1
    beams: Beams = field(default_factory=Beams)


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
    sampled = given.get("do_sample", False)
    if not isinstance(sampled, bool):  # what counts as true is not the same everywhere
        raise BundleError(
            f"the bundle's generation_config is wrong: do_sample must be true or false, "
            f"{sampled!r} was given"
        )
    refused = sorted(name for name, value in given.items() if _changes_tokens(name, value))
    if sampled and given.get("num_beams", 1) != 1:
        refused = sorted({*refused, "do_sample", "num_beams"})  # sampled beams
    if refused:
        values = ", ".join(f"{name}={given[name]!r}" for name in refused)
        raise BundleError(
            f"the bundle's generation_config asks for {values}, which this runtime does not "
            f"support and which may change the tokens; to run without, ignore "
            f"{'it' if len(refused) == 1 else 'them'} by name: ignore={tuple(refused)!r}"
        )
    used = {_OPTION.get(k, k): v for k, v in given.items() if k in USED and k != "do_sample"}
    used = {k: v for k, v in used.items() if not (k in _EMPTY_IS_NONE and v in ([], {}))}
    try:
        check(used)
    except RequestError as error:
        raise BundleError(f"the bundle's generation_config is wrong: {error}") from error
    own = {each.name: used[each.name] for each in records(Sampling) if each.name in used}
    own |= {name: read(used[name]) for name, read in _READ.items() if name in used}
    own["temperature"] = used.get("temperature", 1.0) if sampled else 0.0
    beams = {each.name: used[each.name] for each in records(Beams) if each.name in used}
    return Defaults(
        sampling=Sampling(**own),
        max_new_tokens=used.get("max_new_tokens"),
        max_length=used.get("max_length"),
        eos_token_ids=_several(used.get("eos_token_id", ())),
        stop=_several(used.get("stop", ())),
        n=used.get("n", 1),
        beams=Beams(**beams),
    )


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


# Lists of the file → tuples of `Sampling`.
_READ: dict[str, Callable[[Any], Any]] = {
    "bad_words": lambda value: tuple(map(tuple, value)),
    "begin_suppress_tokens": tuple,
    "forced_eos": _several,
    "logit_bias": read_bias,
    "suppress_tokens": tuple,
}
_EMPTY_IS_NONE = frozenset({"logit_bias"})


def _changes_tokens(name: str, value: Any) -> bool:
    if name in USED or name in IGNORED:
        return False
    return name not in NEUTRAL or value not in NEUTRAL[name]
