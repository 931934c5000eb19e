"""The cache ports of a backbone: which there are, and which output becomes which input.

Keys and values grow by a slot per token; states are as large after a thousand tokens as after one.
`N` is the layer of the model that owns the port, so numbers may be missing in a hybrid.
"""

from __future__ import annotations

__all__ = [
    "FEATURES",
    "SOURCE_IDS",
    "SOURCE_MASK",
    "cache_slots",
    "free_dimensions",
    "is_cross",
    "is_past",
    "is_present",
    "is_state",
    "present_name",
]

# The attention operator wants room for a chunk's padding behind every row, also behind a full one.
# With this many slots more than tokens, a chunk never has to be cut narrower than that.
# runtime/cpp/src/generator/in_place_runner.cc has the same number.
SPARE_SLOTS = 64

# Input `X.N…` takes what output `Y.N…` of the step before gave.
_GROWING = {"past_key_values": "present"}
_STATES = {
    "past_conv_states": "present_conv_states",
    "past_recurrent_states": "present_recurrent_states",
}
_PRESENT = _GROWING | _STATES
# What the decoder's layers attend to of a source: `X.N.key`, `X.N.value`, the same in every step.
_CROSS = "cross_key_values"
# What an encoder reads: ids with their mask, which its backbone reads as well, or features.
SOURCE_IDS = "source_ids"
SOURCE_MASK = "source_mask"
FEATURES = "input_features"


def is_past(name: str) -> bool:
    """Whether an input holds a cache."""
    return name.partition(".")[0] in _PRESENT


def is_cross(name: str) -> bool:
    """Whether a port holds cross keys or values: an encoder's output and its backbone's input."""
    return name.partition(".")[0] == _CROSS


def is_present(name: str) -> bool:
    """Whether an output is the next step's cache."""
    return name.partition(".")[0] in _PRESENT.values()


def is_state(name: str) -> bool:
    """Whether a cache port, of either side, is of a fixed size: [batch, …]."""
    kind = name.partition(".")[0]
    return kind in _STATES or kind in _STATES.values()


def present_name(past: str) -> str:
    """The output that becomes the cache input `past`."""
    kind, _, rest = past.partition(".")
    return f"{_PRESENT[kind]}.{rest}"


def free_dimensions(name: str) -> dict[int, str]:
    """Axis → symbol of the dimensions that callers vary, of a cache port of a portable backbone."""
    if is_state(name):
        return {0: "batch"}
    if is_cross(name):
        # A batch of its own: 1 where all rows read one source.
        return {0: "source_batch", 2: "source"}
    return {0: "batch", 2: "past_sequence" if is_past(name) else "total_sequence"}


def cache_slots(capacity: int) -> int:
    """Slots of a fixed cache that holds `capacity` tokens per row."""
    return capacity + min(capacity, SPARE_SLOTS)
