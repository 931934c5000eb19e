"""Names of cache ports, and what follows from them."""

from __future__ import annotations

import pytest

from headport.cache_ports import free_dimensions, is_past, is_present, is_state, present_name

PAIRS = {
    "past_key_values.3.key": "present.3.key",
    "past_conv_states.3": "present_conv_states.3",
    "past_recurrent_states.3": "present_recurrent_states.3",
}


@pytest.mark.parametrize("past", PAIRS)
def test_each_cache_input_has_its_output(past: str) -> None:
    present = present_name(past)
    assert present == PAIRS[past]
    assert is_past(past) and not is_present(past)
    assert is_present(present) and not is_past(present)
    assert is_state(past) == is_state(present) == ("states" in past)


@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "hidden_states", "seqlens_k"])
def test_other_ports_are_no_caches(name: str) -> None:
    assert not is_past(name) and not is_present(name) and not is_state(name)


def test_only_keys_and_values_grow() -> None:
    assert free_dimensions("past_key_values.0.key") == {0: "batch", 2: "past_sequence"}
    assert free_dimensions("present.0.value") == {0: "batch", 2: "total_sequence"}
    assert free_dimensions("present_conv_states.0") == {0: "batch"}
