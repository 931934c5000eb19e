"""The tables of fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from headport.errors import RequestError
from headport.runtime.parameters import Options
from headport.runtime.serve.fields import CHAT, COMPLETION, Endpoint, options_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "serving.md"


@pytest.mark.parametrize("endpoint", [COMPLETION, CHAT])
def test_every_field_is_on_the_page_and_every_option_exists(endpoint: Endpoint) -> None:
    page = PAGE.read_text()
    own = endpoint.own - {"stream_options"}  # on the page with what is in it
    assert not [name for name in (*own, *endpoint.options) if f"`{name}`" not in page]
    # Those two are the call's own arguments.
    assert set(endpoint.options.values()) - {"condition", "prefix"} <= set(Options.__annotations__)
    assert not (set(endpoint.options) | endpoint.own) & set(endpoint.neutral)


def test_all_that_would_be_left_undone_is_named() -> None:
    CHAT.check({"tools": [], "response_format": {"type": "text"}, "unknown": None, "user": "me"})
    with pytest.raises(RequestError) as found:
        CHAT.check({"tools": [{}], "audio": {}, "top_k": 3, "store": True})
    message = str(found.value)
    assert "tools=[{}] is not supported" in message and "store=True is not" in message
    assert "audio is not a field" in message and "top_k is" not in message.partition("leave")[0]


def test_options_of_a_body() -> None:
    body = {"max_tokens": 3, "temperature": None, "logit_bias": {"7": 1.5}, "user": "me"}
    assert options_of(COMPLETION, body) == {"max_new_tokens": 3, "logit_bias": {7: 1.5}}
    with pytest.raises(RequestError, match="max_completion_tokens and another field both set"):
        options_of(CHAT, {"max_tokens": 3, "max_completion_tokens": 4})
    for bias in ({"a": 1}, [1, 2], 3):
        with pytest.raises(RequestError, match="logit_bias: a mapping"):
            options_of(CHAT, {"logit_bias": bias})
