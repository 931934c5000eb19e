"""Which states a layer keeps, read off the cache that the model filled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import LinearAttentionLayer

from headport.errors import ExportError
from headport.export.states import StateShape, chunk_lengths, layer_states


def filled(conv: Any = None, recurrent: Any = None) -> LinearAttentionLayer:
    layer = LinearAttentionLayer(number_of_states=2)
    for index, shape in enumerate(conv or ()):
        layer.conv_states[index] = torch.zeros(shape)
    for index, shape in enumerate(recurrent or ()):
        layer.recurrent_states[index] = torch.zeros(shape)
    return layer


def test_a_convolution_keeps_one_input_less_than_its_kernel_is_wide() -> None:
    assert list(layer_states(filled(conv=[(1, 6, 4)]), 3)) == [StateShape(3, "conv", (6, 3))]


def test_recurrent_states_are_kept_as_they_are() -> None:
    found = list(layer_states(filled(conv=[(1, 6, 4)], recurrent=[(1, 8, 5, 16)]), 0))
    assert [s.dims for s in found] == [(6, 3), (8, 5, 16)]


def test_ports_carry_the_layer_and_the_type() -> None:
    conv, recurrent = StateShape(7, "conv", (6, 3)), StateShape(7, "recurrent", (6, 2))
    assert (conv.past, conv.present) == ("past_conv_states.7", "present_conv_states.7")
    assert recurrent.past == "past_recurrent_states.7"
    # A recurrence adds up over all tokens, so half precision would lose the later ones.
    assert conv.zeros(2, torch.float16).dtype == torch.float16
    assert recurrent.zeros(2, torch.float16).dtype == torch.float32
    assert recurrent.zeros(2, torch.float16).shape == (2, 6, 2)


def test_a_layer_without_states_has_none() -> None:
    assert list(layer_states(object(), 0)) == []


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (filled(conv=[(1, 6, 4), (1, 6, 4)]), "layer 5 keeps 2 conv states"),
        (filled(recurrent=[(1, 6, 4), (1, 6, 4)]), "layer 5 keeps 2 recurrent states"),
        (filled(conv=[(1, 6, 2, 4)]), r"layer 5 keeps a convolution state of shape \(1, 6, 2, 4\)"),
    ],
)
def test_what_has_no_port_is_refused(layer: LinearAttentionLayer, reason: str) -> None:
    with pytest.raises(ExportError, match=reason):
        list(layer_states(layer, 5))


def test_a_comparison_must_be_longer_than_a_chunk() -> None:
    conv, channels = StateShape(0, "conv", (6, 3)), StateShape(0, "recurrent", (6, 2))
    assert chunk_lengths([object(), conv, channels]) == ()
    assert chunk_lengths([conv, StateShape(1, "recurrent", (8, 5, 16))]) == (64,)
