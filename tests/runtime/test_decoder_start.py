"""How a decoder starts, read from a generation_config."""

from __future__ import annotations

import pytest

from headport.errors import BundleError, PromptError
from headport.runtime.decoder_start import read_start

WHISPER = {
    "decoder_start_token_id": 50,
    "no_timestamps_token_id": 60,
    "lang_to_id": {"<|en|>": 51, "<|de|>": 52},
    "task_to_id": {"transcribe": 58},
    "is_multilingual": True,
    "return_timestamps": False,
}


@pytest.mark.parametrize(
    ("fields", "prefix", "prompt"),
    [
        ({"decoder_start_token_id": 0}, None, [0]),
        ({"bos_token_id": 4}, None, [4]),
        ({"decoder_start_token_id": 0, "bos_token_id": 4}, [7, 8], [0, 7, 8]),
        ({"decoder_start_token_id": 0}, [0, 7], [0, 7]),
        ({"decoder_start_token_id": 0, "forced_decoder_ids": [[2, 6], [1, 5]]}, None, [0, 5, 6]),
        ({"decoder_start_token_id": 0, "forced_decoder_ids": [[1, 5]]}, [7], [0, 7]),
        (WHISPER, [51, 58], [50, 51, 58, 60]),
        (WHISPER, [51, 58, 60], [50, 51, 58, 60]),
        (WHISPER | {"forced_decoder_ids": [[1, 52], [2, 58]]}, None, [50, 52, 58, 60]),
        ({"decoder_start_token_id": 50, "no_timestamps_token_id": 60}, None, [50, 60]),
    ],
)
def test_the_tokens_a_reply_continues(fields, prefix, prompt):
    assert read_start(fields).prompt(prefix) == prompt


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (WHISPER, "several languages and its generation_config names none"),
        (WHISPER | {"forced_decoder_ids": [[1, None], [2, 58]]}, "leaves the language open"),
        (WHISPER | {"language": "en"}, "names a language or a task in words"),
    ],
)
def test_a_language_must_be_named(fields, message):
    start = read_start(fields)
    with pytest.raises(PromptError, match=message):
        start.prompt(None)
    assert start.prompt([51])[:2] == [50, 51]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "must state decoder_start_token_id.* neither it nor bos_token_id"),
        ({"decoder_start_token_id": [1, 2]}, r"\[1, 2\] is there"),
        (WHISPER | {"return_timestamps": True}, "return_timestamps=True"),
        ({"decoder_start_token_id": 0, "forced_decoder_ids": [[2, 5]]}, "from 1 up was expected"),
        ({"decoder_start_token_id": 0, "forced_decoder_ids": [5]}, "from 1 up was expected"),
    ],
)
def test_what_cannot_be_read_is_named(fields, message):
    with pytest.raises(BundleError, match=message):
        read_start(fields)


def test_a_field_may_be_left_out():
    given = WHISPER | {"return_timestamps": True, "forced_decoder_ids": [[1, 51]]}
    assert read_start(given, ["return_timestamps"]).prompt(None) == [50, 51, 60]
