import dataclasses

import pytest

from headport.errors import RequestError

SAMPLED = {"n": 3, "temperature": 1.0, "seed": 4, "max_new_tokens": 5, "eos_token_id": ()}


def test_the_hook_orders_picks_and_changes_the_replies_of_each_prompt(make):
    generator = make()
    plain = generator.generate(["ab", "c"], **SAMPLED)
    assert [(reply.index, reply.sample) for reply in plain] == [
        (i, s) for i in (0, 1) for s in range(3)
    ]

    def longest_first(replies):
        best = max(replies, key=lambda reply: reply.token_ids)
        return [dataclasses.replace(best, text=best.text.upper())]

    found = generator.generate(["ab", "c"], rerank=longest_first, **SAMPLED)
    assert [reply.token_ids for reply in found] == [
        max(reply.token_ids for reply in plain[:3]),
        max(reply.token_ids for reply in plain[3:]),
    ]
    assert all(reply.text == reply.text.upper() for reply in found)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda replies: [], "at least one Generation was expected back, none came"),
        (lambda replies: ["text"], "expected back, str came"),
        (lambda replies: 1 / 0, "rerank, prompt 0 failed: ZeroDivisionError"),
    ],
)
def test_a_hook_that_gives_no_replies_is_refused(make, hook, message):
    with pytest.raises(RequestError, match=message):
        make().generate(["ab"], rerank=hook, **SAMPLED)
