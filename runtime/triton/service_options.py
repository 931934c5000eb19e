"""How the service of a model is set up: entries of `parameters` in its config.pbtxt.

They are written by `headport triton` and may be changed there by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headport.errors import UsageError
from headport.runtime.exact_option import ExactChoice

__all__ = ["BUNDLE", "PREFIX", "ServiceOptions", "read_service_options"]

BUNDLE = "bundle"  # folder in the model's version
PREFIX = "headport."  # of the entries; all others are Triton's own


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `Generator`, whose arguments they are."""

    slots: int = 0
    max_context: int = 0
    max_new_tokens: int = 1024  # of one reply
    max_replies: int = 32  # to one request
    max_waiting: int = 1024
    prefill_chunk: int = 64
    threads: int = 0
    exact: ExactChoice = "auto"
    timeout: float = 300.0  # seconds of one request, waiting included


def read_service_options(config: Mapping[str, Any]) -> ServiceOptions:
    """Read them from a model's configuration, as Triton hands it over.

    Raises:
        UsageError: If an entry is unknown or has no such value.
    """
    entries = config.get("parameters", {})
    values = {
        name.removeprefix(PREFIX): entry["string_value"]
        for name, entry in entries.items()
        if name.startswith(PREFIX)
    }
    try:
        return msgspec.convert(values, ServiceOptions, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"config.pbtxt, parameters {PREFIX}*: {error}") from error
