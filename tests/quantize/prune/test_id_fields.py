"""Fields that name token ids, of every shape they come in."""

from __future__ import annotations

from typing import Any

import pytest

from headport.quantize.prune.id_fields import ids_of, rename_fields

NEW = {5: 0, 6: 1, 7: 2}


@pytest.mark.parametrize(
    ("name", "value", "expected", "lost"),
    [
        ("eos_token_id", 6, 1, []),
        ("eos_token_id", [5, 300, 7], [0, 2], ["eos_token_id: 300"]),
        ("pad_token_id", 300, None, ["pad_token_id: 300"]),
        ("pad_token_id", None, None, []),
        ("image_token_index", 7, 2, []),
        ("suppress_tokens", [7, 5], [2, 0], []),
        ("begin_suppress_tokens", [8], [], ["begin_suppress_tokens: 8"]),
        ("bad_words_ids", [[5, 6], [5, 300]], [[0, 1]], ["bad_words_ids: [5, 300]"]),
        ("force_words_ids", [[[5], [6, 7]]], [[[0], [1, 2]]], []),
        ("forced_decoder_ids", [[1, 7], [2, None]], [[1, 2], [2, None]], []),
        ("sequence_bias", [[[5, 7], -2.5], [[9], 1.0]], [[[0, 2], -2.5]], ["sequence_bias: [9]"]),
        ("lang_to_id", {"<|en|>": 7, "<|xx|>": 9}, {"<|en|>": 2}, ["lang_to_id: 9"]),
        ("max_new_tokens", 5, 5, []),
        ("use_cache", True, True, []),
        ("forced_eos_token_id", True, True, []),  # a bool is an int in Python, and no id
        (
            "text_config",
            {"bos_token_id": 5, "layers": 5},
            {"bos_token_id": 0, "layers": 5},
            [],
        ),
    ],
)
def test_each_field(name: str, value: Any, expected: Any, lost: list[str]) -> None:
    assert rename_fields({name: value}, NEW.get) == ({name: expected}, lost)


def test_ids_are_found_at_any_depth() -> None:
    fields = {
        "eos_token_id": [2, 900],
        "num_beams": 4,
        "bad_words_ids": [[7, 8]],
        "decoder": {"pad_token_id": 3, "sequence_bias": [[[11], 1.0]]},
    }
    assert ids_of(fields) == {2, 900, 7, 8, 3, 11}
