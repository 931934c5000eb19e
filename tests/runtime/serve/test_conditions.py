"""Conditions of requests: answered as the generator answers them, refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headport.runtime import Generator
from tests.runtime.serve.conftest import EXTRA, MODEL, post, running

VALUES = [0.3, -1.0, 2, 0.1, -0.4]
FIELDS = {"model": MODEL, "max_tokens": 6, "seed": 3, "temperature": 0.8, **EXTRA}


@pytest.fixture
def conditioned(conditioned_bundle: Path) -> Path:
    return conditioned_bundle


def test_replies_are_the_generators(conditioned: Path) -> None:
    given = ("formal", VALUES, None, ["formal", None])
    with Generator(conditioned, threads=1) as generator:
        wanted = [
            [
                reply.token_ids
                for reply in generator.generate(
                    ["The", "A"], condition=each, max_new_tokens=6, seed=3, temperature=0.8
                )
            ]
            for each in given
        ]
    assert wanted[0] != wanted[2] and wanted[3] == [wanted[0][0], wanted[2][1]]
    with running(Generator(conditioned, threads=1, slots=4)) as address:

        def asked(**fields: Any) -> tuple[int, Any]:
            return post(address, json.dumps(FIELDS | {"prompt": ["The", "A"]} | fields).encode())

        for each, expected in zip(given, wanted, strict=True):
            status, document = asked(condition=each)
            assert status == 200, document
            assert [choice["token_ids"] for choice in document["choices"]] == expected
        refused = {
            "no condition 'rude' in this bundle; known are casual, formal": "rude",
            "or 5 numbers, [2] was given": [1, 2],
            "must be finite": [1e39] * 5,
            "or one for each of the 2 prompts": ["formal"] * 3,
            "a list of numbers, or a list with one": 3,
            "True]} was given": {"a": [True]},
            "[] was given": [],
            "[1, 'formal'] was given": [1, "formal"],
        }
        for message, condition in refused.items():
            status, document = asked(condition=condition)
            assert status == 400 and message in document["error"]["message"], document


def test_a_chat_takes_one_and_other_bundles_take_none(
    conditioned: Path, service: Any, generator: Generator
) -> None:
    import openai

    for call in (
        lambda: service.completions.create(
            model=MODEL, prompt="a", extra_body={"condition": "formal"}
        ),
        lambda: service.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "a"}],
            extra_body={"condition": VALUES},
        ),
    ):
        with pytest.raises(openai.BadRequestError) as found:
            call()
        assert "condition: this bundle takes none" in found.value.body["message"]
    with pytest.raises(openai.BadRequestError) as found:
        service.completions.create(model=MODEL, prompt="a", extra_body={"prefix": "b"})
    assert "prefix is for bundles of encoder-decoder" in found.value.body["message"]
    with pytest.raises(openai.BadRequestError) as found:
        service.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "a"}],
            extra_body={"prefix": "b"},
        )
    assert "prefix is not a field" in found.value.body["message"]


def test_triton_takes_it_among_its_parameters(conditioned: Path, tmp_path: Path) -> None:
    from headport.runtime.triton.service import Service
    from tests.runtime.triton.fake_backend import MODULE, Request
    from tests.runtime.triton.test_service import arguments

    options = {"max_tokens": 6, "seed": 3, "temperature": 0.8}
    with Generator(conditioned, threads=1) as generator:
        [wanted] = generator.generate(
            ["The"], condition=VALUES, max_new_tokens=6, seed=3, temperature=0.8
        )
    service = Service(arguments(conditioned, tmp_path, threads="1", slots="2"), MODULE)
    try:
        told = Request(text_input="The", sampling_parameters=options | {"condition": VALUES})
        wrong = Request(text_input="The", sampling_parameters=options | {"condition": "rude"})
        service.take([told, wrong])
        [answer] = told.wait()
        assert answer.outputs["output_ids"].tolist() == wanted.token_ids
        [refused] = wrong.wait()
        assert refused.error is not None and "no condition 'rude'" in str(refused.error)
    finally:
        service.close()
