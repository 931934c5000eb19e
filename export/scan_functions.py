"""The bodies of the recurrences, as ONNX text: a `Scan` over tokens, or over chunks of them.

`new_tokens` [B, T] is 1 where a slot holds a token; for others the state passes through unchanged.
"""

from __future__ import annotations

__all__ = ["CHUNK", "DELTA_RULE", "DUAL_SCAN", "LINEAR_SCAN", "SCANS", "SELECTIVE_SCAN"]

SELECTIVE_SCAN = "SelectiveScan"
DUAL_SCAN = "StateSpaceDual"
DELTA_RULE = "GatedDeltaRule"
LINEAR_SCAN = "LinearRecurrence"
CHUNK = 64  # tokens that `StateSpaceDual` takes at a time

# h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t];  y[t] = C[t] . h[t], one step after the other: A
# differs by channel and by entry of the state, so no product of matrices stands for many steps.
_SELECTIVE_SCAN_BODY = """
  last = Constant <value_ints = [-1]> ()
  none = Constant <value_float = 0.0> ()
  flag = Cast <to = 9> (new_tokens)
  flag_column = Unsqueeze (flag, last)
  x_float = Cast <to = 1> (x)
  dt_float = Cast <to = 1> (dt)
  B_float = Cast <to = 1> (B)
  C_float = Cast <to = 1> (C)
  dt_valid = Where (flag_column, dt_float, none)
  driven = Mul (dt_valid, x_float)
  dt_steps = Transpose <perm = [1, 0, 2]> (dt_valid)
  u_steps = Transpose <perm = [1, 0, 2]> (driven)
  B_steps = Transpose <perm = [1, 0, 2]> (B_float)
  C_steps = Transpose <perm = [1, 0, 2]> (C_float)
  present_state, y_steps = Scan <
    num_scan_inputs = 4,
    body = step (float[b, d, n] h, float[b, d] dt_t, float[b, d] u_t, float[b, n] B_t,
                 float[b, n] C_t) => (float[b, d, n] h_next, float[b, d] y_t) {
      column = Constant <value_ints = [-1]> ()
      row = Constant <value_ints = [1]> ()
      dt_column = Unsqueeze (dt_t, column)
      exponent = Mul (dt_column, A)
      decay = Exp (exponent)
      kept = Mul (decay, h)
      u_column = Unsqueeze (u_t, column)
      B_row = Unsqueeze (B_t, row)
      added = Mul (u_column, B_row)
      h_next = Add (kept, added)
      C_column = Unsqueeze (C_t, column)
      y_column = MatMul (h_next, C_column)
      y_t = Squeeze (y_column, column)
    }
  > (past_state, dt_steps, u_steps, B_steps, C_steps)
  y = Transpose <perm = [1, 0, 2]> (y_steps)
"""

# h[t] = exp(dt[t] A) h[t-1] + (dt[t] x[t]) B[t]^T;  y[t] = h[t] C[t], A one number per head. Up to
# CHUNK tokens at a time: with s[t] the running sum of dt A since the chunk began,
#   y = (tril(exp(s[t] - s[r])) * (C B^T)) (dt x) + exp(s) (h C^T)^T,
#   h' = exp(s[last]) h + (exp(s[last] - s) dt x)^T B.
# The sums run in float64: they grow with the chunk, and their differences are what counts. No
# exponent is above zero, so nothing overflows. The last chunk is filled up with dt = 0.
_DUAL_SCAN_BODY = """
  one = Constant <value_ints = [1]> ()
  zero = Constant <value_ints = [0]> ()
  rest = Constant <value_ints = [-1]> ()
  most = Constant <value_ints = [CHUNK]> ()
  none = Constant <value_float = 0.0> ()
  lead = Constant <value_ints = [0, 0, 0]> ()
  T = Shape <start = 1, end = 2> (x)
  H = Shape <start = 2, end = 3> (x)
  D = Shape <start = 3, end = 4> (x)
  G = Shape <start = 2, end = 3> (B)
  N = Shape <start = 3, end = 4> (B)
  R = Div (H, G)
  L = Min (T, most)
  T_minus = Sub (T, one)
  full = Div (T_minus, L)
  chunks = Add (full, one)
  filled = Mul (chunks, L)
  missing = Sub (filled, T)
  pads_3 = Concat <axis = 0> (lead, zero, missing, zero)
  pads_4 = Concat <axis = 0> (zero, lead, zero, missing, zero, zero)
  flag = Cast <to = 9> (new_tokens)
  flag_column = Unsqueeze (flag, rest)
  x_float = Cast <to = 1> (x)
  dt_float = Cast <to = 1> (dt)
  B_float = Cast <to = 1> (B)
  C_float = Cast <to = 1> (C)
  dt_valid = Where (flag_column, dt_float, none)
  dt_column = Unsqueeze (dt_valid, rest)
  driven = Mul (dt_column, x_float)
  exponent = Mul (dt_valid, A)
  exponent_filled = Pad (exponent, pads_3)
  u_filled = Pad (driven, pads_4)
  B_filled = Pad (B_float, pads_4)
  C_filled = Pad (C_float, pads_4)
  head_shape = Concat <axis = 0> (zero, chunks, L, G, R)
  u_shape = Concat <axis = 0> (zero, chunks, L, G, R, D)
  group_shape = Concat <axis = 0> (zero, chunks, L, G, one, N)
  exponent_cut = Reshape (exponent_filled, head_shape)
  u_cut = Reshape (u_filled, u_shape)
  B_cut = Reshape (B_filled, group_shape)
  C_cut = Reshape (C_filled, group_shape)
  exponent_chunks = Transpose <perm = [1, 0, 3, 4, 2]> (exponent_cut)
  u_chunks = Transpose <perm = [1, 0, 3, 4, 2, 5]> (u_cut)
  B_chunks = Transpose <perm = [1, 0, 3, 4, 2, 5]> (B_cut)
  C_chunks = Transpose <perm = [1, 0, 3, 4, 2, 5]> (C_cut)
  state_shape = Concat <axis = 0> (zero, G, R, D, N)
  first_state = Reshape (past_state, state_shape)
  last_state, y_chunks = Scan <
    num_scan_inputs = 4,
    body = chunk (float[b, g, r, p, n] h, float[b, g, r, l] a, float[b, g, r, l, p] u,
                  float[b, g, k, l, n] B_c, float[b, g, k, l, n] C_c)
        => (float[b, g, r, p, n] h_next, float[b, g, r, l, p] y_c) {
      axis = Constant <value_int = 3> ()
      from_zero = Constant <value_int = 0> ()
      by_one = Constant <value_int = 1> ()
      column = Constant <value_ints = [-1]> ()
      row = Constant <value_ints = [-2]> ()
      end = Constant <value_ints = [9223372036854775807]> ()
      time = Constant <value_ints = [3]> ()
      never = Constant <value_float = -1e30> ()
      a_double = Cast <to = 11> (a)
      s = CumSum (a_double, axis)
      s_column = Unsqueeze (s, column)
      s_row = Unsqueeze (s, row)
      since_double = Sub (s_column, s_row)
      since = Cast <to = 1> (since_double)
      length = Shape <start = 3, end = 4> (a)
      count = Squeeze (length)
      slots = Range (from_zero, count, by_one)
      slot_column = Unsqueeze (slots, column)
      past_or_self = GreaterOrEqual (slot_column, slots)
      exponents = Where (past_or_self, since, never)
      decay = Exp (exponents)
      B_turned = Transpose <perm = [0, 1, 2, 4, 3]> (B_c)
      likeness = MatMul (C_c, B_turned)
      weights = Mul (likeness, decay)
      y_inside = MatMul (weights, u)
      C_turned = Transpose <perm = [0, 1, 2, 4, 3]> (C_c)
      y_state_turned = MatMul (h, C_turned)
      y_state = Transpose <perm = [0, 1, 2, 4, 3]> (y_state_turned)
      before = Cast <to = 1> (s_column)
      decay_before = Exp (before)
      y_before = Mul (y_state, decay_before)
      y_c = Add (y_inside, y_before)
      s_last = Slice (s, column, end, time)
      left_double = Sub (s_last, s)
      left = Cast <to = 1> (left_double)
      decay_after = Exp (left)
      after_column = Unsqueeze (decay_after, column)
      u_after = Mul (u, after_column)
      u_turned = Transpose <perm = [0, 1, 2, 4, 3]> (u_after)
      h_new = MatMul (u_turned, B_c)
      whole = Cast <to = 1> (s_last)
      decay_all = Exp (whole)
      all_column = Unsqueeze (decay_all, column)
      h_kept = Mul (h, all_column)
      h_next = Add (h_kept, h_new)
    }
  > (first_state, exponent_chunks, u_chunks, B_chunks, C_chunks)
  full_shape = Concat <axis = 0> (zero, H, D, N)
  present_state = Reshape (last_state, full_shape)
  y_turned = Transpose <perm = [1, 0, 4, 2, 3, 5]> (y_chunks)
  y_shape = Concat <axis = 0> (zero, rest, H, D)
  y_filled = Reshape (y_turned, y_shape)
  y = Slice (y_filled, zero, T, one)
"""

# With d[t] = exp(g[t]) h[t-1]:  h[t] = d[t] + k[t] (beta[t] (v[t] - d[t]^T k[t]))^T;
# y[t] = h[t]^T q[t], one step after the other: each reads what the one before has written.
_DELTA_RULE_BODY = """
  one = Constant <value_ints = [1]> ()
  zero = Constant <value_ints = [0]> ()
  last = Constant <value_ints = [-1]> ()
  none = Constant <value_float = 0.0> ()
  T = Shape <start = 1, end = 2> (v)
  H = Shape <start = 2, end = 3> (v)
  P = Shape <start = 3, end = 4> (v)
  G = Shape <start = 2, end = 3> (k)
  N = Shape <start = 3, end = 4> (k)
  R = Div (H, G)
  flag = Cast <to = 9> (new_tokens)
  flag_column = Unsqueeze (flag, last)
  q_float = Cast <to = 1> (q)
  k_float = Cast <to = 1> (k)
  v_float = Cast <to = 1> (v)
  g_float = Cast <to = 1> (g)
  beta_float = Cast <to = 1> (beta)
  g_valid = Where (flag_column, g_float, none)
  beta_valid = Where (flag_column, beta_float, none)
  head_shape = Concat <axis = 0> (zero, T, G, R)
  value_shape = Concat <axis = 0> (zero, T, G, R, P)
  state_shape = Concat <axis = 0> (zero, G, R, N, P)
  g_heads = Reshape (g_valid, head_shape)
  beta_heads = Reshape (beta_valid, head_shape)
  v_heads = Reshape (v_float, value_shape)
  q_steps = Transpose <perm = [1, 0, 2, 3]> (q_float)
  k_steps = Transpose <perm = [1, 0, 2, 3]> (k_float)
  v_steps = Transpose <perm = [1, 0, 2, 3, 4]> (v_heads)
  g_steps = Transpose <perm = [1, 0, 2, 3]> (g_heads)
  beta_steps = Transpose <perm = [1, 0, 2, 3]> (beta_heads)
  first_state = Reshape (past_state, state_shape)
  last_state, y_steps = Scan <
    num_scan_inputs = 5,
    body = step (float[b, g, r, n, p] h, float[b, g, n] q_t, float[b, g, n] k_t,
                 float[b, g, r, p] v_t, float[b, g, r] g_t, float[b, g, r] beta_t)
        => (float[b, g, r, n, p] h_next, float[b, g, r, p] y_t) {
      heads = Constant <value_ints = [2, 3]> ()
      column = Constant <value_ints = [2, 4]> ()
      matrix = Constant <value_ints = [3, 4]> ()
      row = Constant <value_ints = [3]> ()
      decay_log = Unsqueeze (g_t, matrix)
      decay = Exp (decay_log)
      held = Mul (h, decay)
      k_row = Unsqueeze (k_t, heads)
      known = MatMul (k_row, held)
      v_row = Unsqueeze (v_t, row)
      news = Sub (v_row, known)
      rate = Unsqueeze (beta_t, matrix)
      delta = Mul (news, rate)
      k_column = Unsqueeze (k_t, column)
      added = Mul (k_column, delta)
      h_next = Add (held, added)
      q_row = Unsqueeze (q_t, heads)
      y_row = MatMul (q_row, h_next)
      y_t = Squeeze (y_row, row)
    }
  > (first_state, q_steps, k_steps, v_steps, g_steps, beta_steps)
  full_shape = Concat <axis = 0> (zero, H, N, P)
  present_state = Reshape (last_state, full_shape)
  y_turned = Transpose <perm = [1, 0, 2, 3, 4]> (y_steps)
  y_shape = Concat <axis = 0> (zero, T, H, P)
  y = Reshape (y_turned, y_shape)
"""

# h[t] = a[t] h[t-1] + x[t];  y[t] = h[t].
_LINEAR_SCAN_BODY = """
  last = Constant <value_ints = [-1]> ()
  none = Constant <value_float = 0.0> ()
  whole = Constant <value_float = 1.0> ()
  flag = Cast <to = 9> (new_tokens)
  flag_column = Unsqueeze (flag, last)
  x_float = Cast <to = 1> (x)
  a_float = Cast <to = 1> (a)
  x_valid = Where (flag_column, x_float, none)
  a_valid = Where (flag_column, a_float, whole)
  x_steps = Transpose <perm = [1, 0, 2]> (x_valid)
  a_steps = Transpose <perm = [1, 0, 2]> (a_valid)
  present_state, y_steps = Scan <
    num_scan_inputs = 2,
    body = step (float[b, d] h, float[b, d] x_t, float[b, d] a_t)
        => (float[b, d] h_next, float[b, d] y_t) {
      kept = Mul (a_t, h)
      h_next = Add (kept, x_t)
      y_t = Identity (h_next)
    }
  > (past_state, x_steps, a_steps)
  y = Transpose <perm = [1, 0, 2]> (y_steps)
"""

# Name → header, body; shapes in `headport.export.recurrent_functions`.
SCANS = {
    SELECTIVE_SCAN: (
        f"{SELECTIVE_SCAN} (x, dt, A, B, C, past_state, new_tokens) => (y, present_state)",
        _SELECTIVE_SCAN_BODY,
    ),
    DUAL_SCAN: (
        f"{DUAL_SCAN} (x, dt, A, B, C, past_state, new_tokens) => (y, present_state)",
        _DUAL_SCAN_BODY.replace("CHUNK", str(CHUNK)),
    ),
    LINEAR_SCAN: (
        f"{LINEAR_SCAN} (x, a, past_state, new_tokens) => (y, present_state)",
        _LINEAR_SCAN_BODY,
    ),
    DELTA_RULE: (
        f"{DELTA_RULE} (q, k, v, g, beta, past_state, new_tokens) => (y, present_state)",
        _DELTA_RULE_BODY,
    ),
}
