"""Attention to a source: every position of it, before and after, and no cache.

    SourceAttention[_mask][_bias] <scale> (q, k, v[, source_mask][, bias]) → y

q [B, H, T, D], k and v [B or 1, H, S, D], source_mask [B or 1, S] int64 (1 = valid), bias
[1 or B, H, T, S], added to the scaled scores; y [B, T, H, D]. An encoder's layers attend so to
their own input, and a decoder's to what the encoder gave, which rows of one source share.
"""

from __future__ import annotations

from headport.errors import ExportError

__all__ = ["SOURCE_ATTENTION", "source_attention_name", "source_attention_text"]

SOURCE_ATTENTION = "SourceAttention"
_FEATURES = ("mask", "bias")

_SCORES = """
  scale_float = Constant <value_float : float = @scale> ()
  scale_typed = CastLike (scale_float, q)
  q_scaled = Mul (q, scale_typed)
  k_transposed = Transpose <perm = [0, 1, 3, 2]> (k)
  scores = MatMul (q_scaled, k_transposed)
"""

_BIAS = """
  bias_typed = CastLike (bias, q)
  biased = Add ({scores}, bias_typed)
"""

# The lowest finite float16 instead of -inf: a row whose source is empty stays finite.
_MASK = """
  axes = Constant <value_ints = [1, 2]> ()
  valid_place = Cast <to = 9> (source_mask)
  valid = Unsqueeze (valid_place, axes)
  lowest_float = Constant <value_float = -65504.0> ()
  lowest = CastLike (lowest_float, q)
  masked = Where (valid, {scores}, lowest)
"""

_OUTPUT = """
  probability = Softmax <axis = -1> ({scores})
  y_heads = MatMul (probability, v)
  y = Transpose <perm = [0, 2, 1, 3]> (y_heads)
"""


def source_attention_name(*, mask: bool, bias: bool) -> str:
    """Name of the function with these features, such as `SourceAttention_mask`."""
    flags = zip(_FEATURES, (mask, bias), strict=True)
    return "_".join([SOURCE_ATTENTION, *(name for name, on in flags if on)])


def source_attention_text(name: str) -> tuple[str, str]:
    """Header and body of a function, as ONNX text.

    Raises:
        ExportError: If no function of that name is defined.
    """
    _, *features = name.split("_")
    if any(feature not in _FEATURES for feature in features):
        raise ExportError(f"no function {name} is defined")
    inputs, body, scores = "q, k, v", _SCORES, "scores"
    if "mask" in features:
        inputs += ", source_mask"
    if "bias" in features:
        inputs += ", bias"
        body, scores = body + _BIAS.format(scores=scores), "biased"
    if "mask" in features:
        body, scores = body + _MASK.format(scores=scores), "masked"
    return f"{name} <scale> ({inputs}) => (y)", body + _OUTPUT.format(scores=scores)
