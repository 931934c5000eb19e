"""The model-local ONNX functions of the `headport` domain: attention, positions, experts.

They are the portable definition of what a lowering may replace by a fused operator. One body per
signature, because a body can neither branch on an attribute nor on a missing input; distinct names
instead of overloads, because not every consumer honours overloads.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from headport.errors import ExportError
from headport.export.expert_function import EXPERTS, experts_text
from headport.export.recurrent_functions import recurrent_text
from headport.export.source_function import SOURCE_ATTENTION, source_attention_text

__all__ = [
    "ATTENTION",
    "DOMAIN",
    "EXPERTS",
    "OPSET",
    "POSITIONS",
    "attention_name",
    "define_functions",
    "function_for",
]

DOMAIN = "headport"
ATTENTION = "CachedAttention"
POSITIONS = "Positions"
OPSET = 23

_FEATURES = ("sinks", "slopes", "rounded", "relative", "softcap", "window")
# Inputs behind those that every form has, in this order.
_EXTRAS = ("sinks", "slopes", "relative")


def attention_name(
    *,
    sinks: bool,
    slopes: bool,
    softcap: bool,
    window: bool,
    rounded: bool = False,
    relative: bool = False,
) -> str:
    """Name of the attention function with these features, such as `CachedAttention_softcap`."""
    on = (sinks, slopes, rounded, relative, softcap, window)
    flags = dict(zip(_FEATURES, on, strict=True))
    return "_".join([ATTENTION, *(name for name, on in flags.items() if on)])


# position_ids = max(cumsum(attention_mask) - 1, 0)[:, -T:]: the number of valid tokens before each
# one, so padding on either side, and right padding followed by more tokens, leave positions right.
_POSITIONS_BODY = """
  axis = Constant <value_int = 1> ()
  one = Constant <value_ints = [1]> ()
  zero = Constant <value_int = 0> ()
  T = Shape <start = 1, end = 2> (input_ids)
  S = Shape <start = 1, end = 2> (attention_mask)
  P = Sub (S, T)
  counted = CumSum (attention_mask, axis)
  new = Slice (counted, P, S, one)
  shifted = Sub (new, axis)
  position_ids = Max (shifted, zero)
"""

# d [B, 1, T, S] = position of the query minus position of the key, counted in valid tokens.
_ALLOWED = """
  present_key = Concat <axis = 2> (past_key, k)
  present_value = Concat <axis = 2> (past_value, v)
  zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  first = Constant <value_ints = [0]> ()
  second = Constant <value_ints = [1]> ()
  rest = Constant <value_ints = [-1]> ()
  query_axes = Constant <value_ints = [1, 3]> ()
  key_axes = Constant <value_ints = [1, 2]> ()
  head_axes = Constant <value_ints = [0, 2, 3]> ()
  T = Shape <start = 2, end = 3> (q)
  S = Shape <start = 2, end = 3> (present_key)
  P = Sub (S, T)
  counted = CumSum (attention_mask, one)
  query_counted = Slice (counted, P, S, second)
  query_position = Unsqueeze (query_counted, query_axes)
  key_position = Unsqueeze (counted, key_axes)
  d = Sub (query_position, key_position)
  valid_slot = Cast <to = 9> (attention_mask)
  valid = Unsqueeze (valid_slot, key_axes)
  past_or_self = GreaterOrEqual (d, zero)
  causal = And (past_or_self, valid)
"""

# Queries that share a key head are stacked, so keys and values are never repeated.
_SCORES = """
  KV = Shape <start = 1, end = 2> (k)
  H = Shape <start = 1, end = 2> (q)
  D = Shape <start = 3, end = 4> (q)
  Dv = Shape <start = 3, end = 4> (v)
  scale_float = Constant <value_float : float = @scale> ()
  scale_typed = CastLike (scale_float, q)
  q_scaled = Mul (q, scale_typed)
  stacked_shape = Concat <axis = 0> (first, KV, rest, D)
  q_stacked = Reshape (q_scaled, stacked_shape)
  k_transposed = Transpose <perm = [0, 1, 3, 2]> (present_key)
  scores_stacked = MatMul (q_stacked, k_transposed)
  scores_shape = Concat <axis = 0> (first, H, T, S)
  scores = Reshape (scores_stacked, scores_shape)
"""

_SOFTCAP = """
  cap_float = Constant <value_float : float = @softcap> ()
  cap = CastLike (cap_float, q)
  ratio = Div ({scores}, cap)
  squashed = Tanh (ratio)
  capped = Mul (squashed, cap)
"""

_SLOPES = """
  behind = Neg (d)
  behind_typed = CastLike (behind, q)
  slope = Unsqueeze (slopes, head_axes)
  slope_typed = CastLike (slope, q)
  linear = Mul (slope_typed, behind_typed)
  biased = Add ({scores}, linear)
"""

# slope · position in bfloat16, as Falcon computes it, then scaled like the scores. Counted from the
# query, which changes no probability and keeps what is near precise in half precision.
_ROUNDED = """
  slope = Unsqueeze (slopes, head_axes)
  slope_float = Cast <to = 1> (slope)
  key_index = Sub (key_position, one)
  query_index = Sub (query_position, one)
  key_rounded = Cast <to = 16> (key_index)
  query_rounded = Cast <to = 16> (query_index)
  key_float = Cast <to = 1> (key_rounded)
  query_float = Cast <to = 1> (query_rounded)
  key_linear = Mul (slope_float, key_float)
  query_linear = Mul (slope_float, query_float)
  key_linear_rounded = Cast <to = 16> (key_linear)
  query_linear_rounded = Cast <to = 16> (query_linear)
  key_bias = Cast <to = 1> (key_linear_rounded)
  query_bias = Cast <to = 1> (query_linear_rounded)
  difference = Sub (key_bias, query_bias)
  bias_float = Mul (difference, scale_float)
  bias = CastLike (bias_float, q)
  biased = Add ({scores}, bias)
"""

# One row of the table per distance, the last one for all from there on. [B, T, S, H] is looked up.
_RELATIVE = """
  distances = Shape <start = 0, end = 1> (relative)
  farthest = Sub (distances, second)
  behind = Max (d, zero)
  distance = Min (behind, farthest)
  distance_rows = Squeeze (distance, second)
  looked_up = Gather <axis = 0> (relative, distance_rows)
  per_head = Transpose <perm = [0, 3, 1, 2]> (looked_up)
  per_head_typed = CastLike (per_head, q)
  biased = Add ({scores}, per_head_typed)
"""

_WINDOW = """
  width = Constant <value_int : int = @window> ()
  near = Less (d, width)
  allowed = And (causal, near)
"""

# The lowest finite float16 instead of -inf: a row that may attend to nothing stays finite.
_SOFTMAX = """
  lowest_float = Constant <value_float = -65504.0> ()
  lowest = CastLike (lowest_float, q)
  masked = Where ({allowed}, {scores}, lowest)
  probability = Softmax <axis = -1> (masked)
"""

# A sink is one more score per head that takes probability and gives no value.
_SINK_SOFTMAX = """
  lowest_float = Constant <value_float = -65504.0> ()
  lowest = CastLike (lowest_float, q)
  masked = Where ({allowed}, {scores}, lowest)
  B = Shape <start = 0, end = 1> (q)
  sink = Unsqueeze (sinks, head_axes)
  sink_typed = CastLike (sink, q)
  sink_shape = Concat <axis = 0> (B, H, T, second)
  sink_column = Expand (sink_typed, sink_shape)
  with_sink = Concat <axis = 3> (masked, sink_column)
  all_probability = Softmax <axis = -1> (with_sink)
  last_axis = Constant <value_ints = [3]> ()
  probability = Slice (all_probability, first, S, last_axis)
"""

_OUTPUT = """
  probability_shape = Concat <axis = 0> (first, KV, rest, S)
  p_stacked = Reshape (probability, probability_shape)
  y_stacked = MatMul (p_stacked, present_value)
  y_shape = Concat <axis = 0> (first, H, T, Dv)
  y_heads = Reshape (y_stacked, y_shape)
  y = Transpose <perm = [0, 2, 1, 3]> (y_heads)
"""


def function_for(name: str) -> ir.Function:
    """The function of the `headport` domain with this name.

    `CachedAttention…` takes q [B, Hq, T, D], k [B, KV, T, D], v [B, KV, T, Dv], past_key
    [B, KV, P, D], past_value [B, KV, P, Dv], attention_mask [B, P + T] int64, then sinks [Hq],
    slopes [Hq] and relative [R, Hq] where its name says so, and gives y [B, T, Hq, Dv],
    present_key, present_value.
    Slopes add slope · (position of the key − position of the query) to the scaled scores; with
    `rounded`, scale · (bf16(slope · bf16(position of the key)) − the same of the query). `relative`
    adds its row min(position of the query − position of the key, R − 1).
    `SourceAttention…` is described in `headport.export.source_function`.
    `Positions` takes attention_mask [B, P + T] and input_ids [B, T], gives position_ids [B, T].
    `MixtureOfExperts…` is described in `headport.export.expert_function`, those of recurrent
    layers in `headport.export.recurrent_functions`.

    Raises:
        ExportError: If no such function is defined.
    """
    if name == POSITIONS:
        return _parse(f"{POSITIONS} (attention_mask, input_ids) => (position_ids)", _POSITIONS_BODY)
    if (text := recurrent_text(name)) is not None:
        return _parse(*text)
    texts = {
        ATTENTION: _attention_text,
        EXPERTS: experts_text,
        SOURCE_ATTENTION: source_attention_text,
    }
    base = name.split("_", maxsplit=1)[0]
    if base not in texts:
        raise ExportError(f"no function {DOMAIN}::{name} is defined")
    return _parse(*texts[base](name))


def _attention_text(name: str) -> tuple[str, str]:
    _, *features = name.split("_")
    if any(feature not in _FEATURES for feature in features):
        raise ExportError(f"no function {DOMAIN}::{name} is defined")
    inputs = "q, k, v, past_key, past_value, attention_mask"
    inputs += "".join(f", {extra}" for extra in _EXTRAS if extra in features)
    header = f"{name} <scale, window, softcap> ({inputs}) => (y, present_key, present_value)"
    body, scores, allowed = _ALLOWED + _SCORES, "scores", "causal"
    if "softcap" in features:
        body, scores = body + _SOFTCAP.format(scores=scores), "capped"
    if "slopes" in features:
        slopes = _ROUNDED if "rounded" in features else _SLOPES
        body, scores = body + slopes.format(scores=scores), "biased"
    if "relative" in features:
        body, scores = body + _RELATIVE.format(scores=scores), "biased"
    if "window" in features:
        body, allowed = body + _WINDOW, "allowed"
    softmax = _SINK_SOFTMAX if "sinks" in features else _SOFTMAX
    body += softmax.format(scores=scores, allowed=allowed) + _OUTPUT
    return header, body


def _parse(header: str, body: str) -> ir.Function:
    text = f'<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>\n{header}\n{{{body}}}'
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))


def define_functions(model: ir.Model) -> None:
    """Add the definition of every `headport` function the graph calls."""
    names = {node.op_type for node in model.graph if node.domain == DOMAIN}
    for name in sorted(names):
        function = function_for(name)
        model.functions[function.identifier()] = function
    model.opset_imports[DOMAIN] = 1
