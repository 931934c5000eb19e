"""The model-local ONNX functions of recurrent layers, of the `headport` domain, as ONNX text.

Each is one recurrence over the new tokens of a batch, started from a state and ending in the next
one. `new_tokens` [B, T] int64 is 1 where a slot holds a token: what is padding changes no state,
and what a real token gives does not depend on where padding lies. Sums run in float32, whatever
the type of the activations.
"""

from __future__ import annotations

from headport.export.scan_functions import SCANS

__all__ = ["CONVOLUTION", "NEW_TOKENS", "recurrent_text"]

NEW_TOKENS = "NewTokens"
CONVOLUTION = "CausalConvolution"

# The mask's last T columns: those of this step's tokens.
_NEW_TOKENS_BODY = """
  axis = Constant <value_ints = [1]> ()
  T = Shape <start = 1, end = 2> (input_ids)
  S = Shape <start = 1, end = 2> (attention_mask)
  P = Sub (S, T)
  new_tokens = Slice (attention_mask, P, S, axis)
"""

# y[t] = sum_k weight[:, k] * (the input k - (K - 1) valid tokens before t), the state standing in
# for tokens of earlier steps. The tokens of a row are moved together, padding behind them
# (`place` says where each one goes, `source` which one comes), and their results moved back; the
# next state is what lies in front of the first slot that holds no token. A sum of K shifted
# products, because a convolution whose groups are single channels runs them one by one.
_CONVOLUTION_BODY = """
  one = Constant <value_ints = [1]> ()
  zero = Constant <value_int = 0> ()
  step = Constant <value_int = 1> ()
  last = Constant <value_ints = [-1]> ()
  T = Shape <start = 1, end = 2> (x)
  width = Shape <start = 1, end = 2> (weight)
  history = Sub (width, one)
  flag = Cast <to = 9> (new_tokens)
  valid = Cast <to = 7> (flag)
  empty = Sub (one, valid)
  valid_before = CumSum <exclusive = 1> (valid, step)
  empty_before = CumSum <exclusive = 1> (empty, step)
  count = ReduceSum <keepdims = 1> (valid, one)
  behind = Add (count, empty_before)
  place = Where (flag, valid_before, behind)
  tokens = Squeeze (T)
  slots = Range (zero, tokens, step)
  blank = Mul (place, zero)
  slot = Add (blank, slots)
  source = ScatterElements <axis = 1> (blank, place, slot)
  source_index = Unsqueeze (source, last)
  packed = GatherND <batch_dims = 1> (x, source_index)
  past = Transpose <perm = [0, 2, 1]> (past_state)
  joined = Concat <axis = 1> (past, packed)
  joined_float = Cast <to = 1> (joined)
  weight_float = Cast <to = 1> (weight)
  taps = Transpose <perm = [1, 0]> (weight_float)
{taps}
  packed_y = CastLike ({sum}, x)
  place_index = Unsqueeze (place, last)
  y = GatherND <batch_dims = 1> (packed_y, place_index)
  kept = Squeeze (history)
  offsets = Range (zero, kept, step)
  recent = Add (count, offsets)
  recent_index = Unsqueeze (recent, last)
  present = GatherND <batch_dims = 1> (joined, recent_index)
  present_state = Transpose <perm = [0, 2, 1]> (present)
"""


def _convolution_text(width: int) -> tuple[str, str]:
    rows = ", ".join(f"tap_{k}" for k in range(width))
    lines = [f"  {rows} = Split <axis = 0, num_outputs = {width}> (taps)"]
    for k in range(width):
        lines += [
            f"  from_{k} = Constant <value_ints = [{k}]> ()",
            f"  to_{k} = Add (from_{k}, T)",
            f"  input_{k} = Slice (joined_float, from_{k}, to_{k}, one)",
            f"  term_{k} = Mul (input_{k}, tap_{k})",
        ]
        if k:
            lines.append(f"  sum_{k} = Add ({'term_0' if k == 1 else f'sum_{k - 1}'}, term_{k})")
    last = f"sum_{width - 1}" if width > 1 else "term_0"
    header = f"{CONVOLUTION}_{width} (x, past_state, new_tokens, weight) => (y, present_state)"
    return header, _CONVOLUTION_BODY.format(taps="\n".join(lines), sum=last)


def recurrent_text(name: str) -> tuple[str, str] | None:
    """Header and body of a function, as ONNX text; None if it is none of these.

    `NewTokens` takes attention_mask [B, P + T] and input_ids [B, T], gives new_tokens [B, T].
    `CausalConvolution_K` takes x [B, T, channels], past_state [B, channels, K - 1], new_tokens,
    weight [channels, K]; gives y [B, T, channels]. The others take and give states in float32, and
    give y in float32: `SelectiveScan` x, dt [B, T, D], A [D, N], B, C [B, T, N], state [B, D, N];
    `StateSpaceDual` x [B, T, H, P], dt [B, T, H], A [H], B, C [B, T, G, N], state [B, H, P, N];
    `GatedDeltaRule` q, k [B, T, G, N], v [B, T, H, P], g, beta [B, T, H], state [B, H, N, P];
    `LinearRecurrence` x, a [B, T, D], state [B, D]. Each of G groups serves H / G heads that follow
    each other.
    """
    base, _, width = name.partition("_")
    if base == CONVOLUTION and width.isdecimal():
        return _convolution_text(int(width))
    if name == NEW_TOKENS:
        return f"{NEW_TOKENS} (attention_mask, input_ids) => (new_tokens)", _NEW_TOKENS_BODY
    return SCANS.get(name)
