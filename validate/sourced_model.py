"""An encoder-decoder model called as a causal one; part of the reference's process."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from headport.errors import CheckpointError
from headport.validate.given_source import GivenSource

__all__ = ["SourcedModel"]

_EXAMPLE = GivenSource(token_ids=(3, 1, 2))


class SourcedModel:
    """Takes the tokens of its decoder as `input_ids`, and answers to the source that was read last.

    Every call without a cache is one forward of the untouched model, encoder included; no mask is
    given, as there is one source and no padding. With a cache, what the encoder gave before is
    handed in again.

    Args:
        inner: A transformers model with `get_encoder` and `get_decoder`.

    Raises:
        CheckpointError: If its generation configuration states no token that a decoder starts with.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._takes_features = inner.main_input_name == "input_features"
        self.start_token = _start_token(inner)
        self._given: dict[str, torch.Tensor] = {}
        self._encoded: BaseModelOutput | None = None
        if self._takes_features:
            self._given = {"input_features": _silence(inner)}
        else:
            self.read(_EXAMPLE)

    def read(self, source: GivenSource) -> None:
        """Let the following calls answer to a source."""
        if bool(source.features) != self._takes_features:
            wanted = "features" if self._takes_features else "a text"
            raise CheckpointError(f"{type(self.inner).__name__} reads {wanted} as its source")
        name = "input_features" if self._takes_features else "input_ids"
        self._given = {name: torch.from_numpy(source.values())[None]}
        self._encoded = None

    def __call__(
        self, *, input_ids: torch.Tensor, use_cache: bool = False, cache: Any = None
    ) -> Any:
        """The model's own output, for decoder tokens [1, T]."""
        given: dict[str, Any] = dict(self._given)
        if cache is not None:
            given = {"encoder_outputs": self._encoded, "cache": cache}
        output = self.inner(**given, decoder_input_ids=input_ids, use_cache=use_cache)
        if cache is None:
            self._encoded = BaseModelOutput(last_hidden_state=output.encoder_last_hidden_state)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _start_token(model: Any) -> int:
    config = model.generation_config
    start = config.decoder_start_token_id
    start = config.bos_token_id if start is None else start
    if not isinstance(start, int):
        raise CheckpointError(
            f"{type(model).__name__}: decoder_start_token_id or bos_token_id, one token id, was "
            f"expected in its generation configuration, {start!r} found"
        )
    return start


def _silence(model: Any) -> torch.Tensor:
    """Features of the model's own size, all zero, [1, bins, frames]."""
    config, encoder = model.config, model.get_encoder()
    frames = config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0]
    return torch.zeros((1, config.num_mel_bins, frames))
