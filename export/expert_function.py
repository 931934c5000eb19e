"""The body of `MixtureOfExperts…`, the portable definition of a layer's routed experts.

A loop over the experts that were chosen by at least one token: each takes its own tokens, so the
work is that of the chosen pairs and the memory that of one expert, whatever their number. Weights
gathered per token would be N · k matrices, all experts for all tokens N · E rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from headport.errors import ExportError

__all__ = ["ACTIVATIONS", "EXPERTS", "ExpertLayout", "experts_text"]

EXPERTS = "MixtureOfExperts"

# From `g` to `a`; elementwise. swiglu is g · sigmoid(alpha · g) times (up + beta), below.
ACTIVATIONS = {
    "swiglu": """
    steep = Mul ({g}, alpha)
    open = Sigmoid (steep)
    a = Mul ({g}, open)
""",
    "gelu": """
    a = Gelu <approximate = "none"> ({g})
""",
    "gelutanh": """
    a = Gelu <approximate = "tanh"> ({g})
""",
    "relu": """
    a = Relu ({g})
""",
    "relu2": """
    positive = Relu ({g})
    a = Mul (positive, positive)
""",
}
_FLAGS = ("gated", "clamped", "interleaved", "transposed", "bias")


@dataclass(frozen=True)
class ExpertLayout:
    """What one expert computes, as its function's name says it.

    gated: down(act(gate) · up), else down(act(up)). clamped: gate ≤ limit, |up| ≤ limit.
    interleaved: rows of the first matrix are gate, up, gate, up …, else all gates first.
    transposed: matrices are [input, output], else [output, input]. bias: both have one.
    """

    activation: str
    gated: bool = True
    clamped: bool = False
    interleaved: bool = False
    transposed: bool = False
    bias: bool = False

    @property
    def name(self) -> str:
        """Name of the function, such as `MixtureOfExperts_swiglu_gated`."""
        flags = (flag for flag in _FLAGS if getattr(self, flag))
        return "_".join([EXPERTS, self.activation, *flags])

    @classmethod
    def from_name(cls, name: str) -> ExpertLayout:
        """The layout that a function's name says.

        Raises:
            ExportError: If no function has this name.
        """
        base, activation, *flags = (*name.split("_"), "")
        flags = flags[:-1]
        if base != EXPERTS or activation not in ACTIVATIONS or set(flags) - set(_FLAGS):
            raise ExportError(f"no function {name} is defined")
        return cls(activation, **{flag: flag in flags for flag in _FLAGS})


# Attributes are read outside the loop: not every consumer resolves them in a body within a body.
_CHOSEN = """
  alpha_float = Constant <value_float : float = @alpha> ()
  beta_float = Constant <value_float : float = @beta> ()
  limit_float = Constant <value_float : float = @limit> ()
  alpha = CastLike (alpha_float, x)
  beta = CastLike (beta_float, x)
  lower_float = Neg (limit_float)
  limit = CastLike (limit_float, x)
  lower_limit = CastLike (lower_float, x)
  first = Constant <value_int = 0> ()
  last = Constant <value_ints = [1]> ()
  minus_one = Constant <value_ints = [-1]> ()
  flat = Reshape (expert_ids, minus_one)
  hits = Unique <sorted = 1> (flat)
  count = Size (hits)
  shape = Shape (x)
  zero = Constant <value_float = 0.0> ()
  none = Expand (zero, shape)
  always = Constant <value = bool {1}> ()
  total = Loop (count, always, none)
  <body = one_expert (int64 index, bool go_on, sum) => (going_on, new_sum) {
    going_on = Identity (go_on)
    expert = Gather (hits, index)
    chosen = Equal (expert_ids, expert)
    places = NonZero (chosen)
    pairs = Transpose (places)
    weight = GatherND (expert_weights, pairs)
    token = Gather (places, first)
    row = Unsqueeze (token, last)
    rows = Gather (x, token)
    W1 = Gather (up_weight, expert)
    W2 = Gather (down_weight, expert)
"""

_SPLIT = {
    False: """
    gate_raw, up_raw = Split <axis = -1, num_outputs = 2> (h)
""",
    True: """
    two = Constant <value_ints = [0, -1, 2]> ()
    h_pairs = Reshape (h, two)
    gate_pair, up_pair = Split <axis = -1, num_outputs = 2> (h_pairs)
    gate_raw = Squeeze (gate_pair, minus_one)
    up_raw = Squeeze (up_pair, minus_one)
""",
}

_CLAMP = """
    gate_clamped = Min (gate_raw, limit)
    up_below = Min (up_raw, limit)
    up_clamped = Max (up_below, lower_limit)
"""

_SHIFT = """
    up_shifted = Add ({up}, beta)
"""

# The sum is float32 whatever x is: ScatterND adds in no narrower type on CPU.
_ADD_UP = """
    wide = Cast <to = 1> (down)
    wide_weight = Cast <to = 1> (weight)
    column = Unsqueeze (wide_weight, last)
    part = Mul (wide, column)
    new_sum = ScatterND <reduction = "add"> (sum, row, part)
  }>
  y = CastLike (total, x)
"""


def _product(x: str, weight: str, bias: str, y: str, layout: ExpertLayout) -> str:
    matrix, text = weight, ""
    if not layout.transposed:
        matrix = f"{weight}_t"
        text = f"    {matrix} = Transpose <perm = [1, 0]> ({weight})\n"
    plain = f"{y}_plain" if layout.bias else y
    text += f"    {plain} = MatMul ({x}, {matrix})\n"
    if layout.bias:
        text += f"    own_{bias} = Gather ({bias}, expert)\n    {y} = Add ({plain}, own_{bias})\n"
    return text


def experts_text(name: str) -> tuple[str, str]:
    """Header and body of a function, as ONNX text.

    Takes x [N, H], expert_ids [N, k] int64 (all different in a row), expert_weights [N, k],
    up_weight [E, 2 I or I, H], down_weight [E, H, I] (transposed: [E, H, 2 I or I], [E, I, H]) and,
    where its name says so, up_bias [E, 2 I or I], down_bias [E, H]; gives y [N, H], the sum over k
    of expert_weights times what the chosen expert answers.

    Raises:
        ExportError: If no function has this name.
    """
    layout = ExpertLayout.from_name(name)
    inputs = "x, expert_ids, expert_weights, up_weight, down_weight"
    inputs += ", up_bias, down_bias" if layout.bias else ""
    body = _CHOSEN + _product("rows", "W1", "up_bias", "h", layout)
    gate, up = "h", ""
    if layout.gated:
        body += _SPLIT[layout.interleaved]
        gate, up = "gate_raw", "up_raw"
        if layout.clamped:
            body, gate, up = body + _CLAMP, "gate_clamped", "up_clamped"
    body += ACTIVATIONS[layout.activation].format(g=gate)
    inner = "a"
    if layout.gated:
        if layout.activation == "swiglu":
            body, up = body + _SHIFT.format(up=up), "up_shifted"
        body, inner = body + f"    inner = Mul (a, {up})\n", "inner"
    body += _product(inner, "W2", "down_bias", "down", layout) + _ADD_UP
    return f"{name} <alpha, beta, limit> ({inputs}) => (y)", body
