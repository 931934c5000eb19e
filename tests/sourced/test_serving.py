"""Encoder-decoder bundles as services: the same replies as the generator's, by HTTP and Triton."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from headport.errors import UsageError
from headport.runtime import Generator
from tests.runtime.serve.conftest import EXTRA, MODEL, post, running
from tests.sourced.models import sources

SETTINGS: dict[str, Any] = {"max_new_tokens": 7, "temperature": 0.9, "seed": 5}
FIELDS = {"max_tokens": 7, "temperature": 0.9, "seed": 5, "model": MODEL, **EXTRA}


def asked(address: str, **fields: Any) -> list[list[int]]:
    status, document = post(address, json.dumps(FIELDS | fields).encode())
    assert status == 200, document
    return [choice["token_ids"] for choice in document["choices"]]


def test_completions_answer_sources_as_the_generator_does(bundle):
    ids = sources("t5", 2)
    texts = ["The head", "It gives one logit per token"]
    with Generator(bundle("t5"), threads=1) as generator:

        def wanted(given: Any, **more: Any) -> list[list[int]]:
            return [r.token_ids for r in generator.generate(given, **(SETTINGS | more))]

        expected = [wanted(given) for given in (texts[0], texts, ids, [ids[0]])]
        begun = wanted(texts[0], prefix=[9, 4])
        several = wanted(texts[0], n=3)
    with running(Generator(bundle("t5"), threads=1, slots=4)) as address:
        given = (texts[0], texts, ids, ids[0])
        assert [asked(address, prompt=each) for each in given] == expected
        assert asked(address, prompt=texts[0], prefix=[9, 4]) == begun != expected[0]
        assert asked(address, prompt=texts[0], n=3) == several
        body = json.dumps(FIELDS | {"prompt": texts[0], "stream": True}).encode()
        request = urllib.request.Request(f"{address}/v1/completions", body, method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = [line[6:] for line in answer.read().decode().splitlines() if line]
        parts = [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]
        assert [i for part in parts for i in part["token_ids"]] == expected[0][0]
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
        request = urllib.request.Request(
            f"{address}/v1/chat/completions", json.dumps(chat).encode(), method="POST"
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        assert refused.value.code == 501 and b"no conversations" in refused.value.read()
        status, document = post(address, json.dumps(FIELDS | {"prompt": ""}).encode())
        assert status == 400 and "source 0 is empty" in document["error"]["message"]


def test_triton_answers_sources_as_the_generator_does(bundle, tmp_path):
    from headport.runtime.triton.service import Service
    from tests.runtime.triton.fake_backend import MODULE, Request
    from tests.runtime.triton.test_service import arguments

    with Generator(bundle("t5"), threads=1) as generator:
        [wanted] = generator.generate(["The head"], prefix=[9], **SETTINGS)
    service = Service(arguments(bundle("t5"), tmp_path, threads="1", slots="2"), MODULE)
    options = {"max_tokens": 7, "temperature": 0.9, "seed": 5, "prefix": [9]}
    try:
        whole = Request(text_input="The head", sampling_parameters=options)
        streamed = Request(text_input="The head", sampling_parameters=options, stream=True)
        messages = [{"role": "user", "content": "a"}]
        chat = Request(messages=messages, sampling_parameters={"max_tokens": 2})
        service.take([whole, streamed, chat])
        [answer] = whole.wait()
        assert answer.outputs["output_ids"].tolist() == wanted.token_ids
        parts = [int(part.outputs["output_ids"][0]) for part in streamed.wait()]
        assert parts == wanted.token_ids
        [refused] = chat.wait()
        assert refused.error is not None and "no conversations" in str(refused.error)
    finally:
        service.close()


def test_a_bundle_that_reads_features_is_refused_before_it_is_loaded(bundle, tmp_path):
    from headport.runtime.serve.command import Options, serve
    from headport.runtime.triton.command import Options as TritonOptions
    from headport.runtime.triton.command import triton

    with pytest.raises(UsageError, match=r"`headport serve` takes texts .* service of your own"):
        serve(Options(bundle=bundle("whisper"), port=0))
    with pytest.raises(UsageError, match="the python backend takes texts"):
        triton(TritonOptions(bundle=bundle("whisper"), output=Path(tmp_path / "r")))
