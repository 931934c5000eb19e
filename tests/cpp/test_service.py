"""The example of a service in C++, as a process of its own, driven by the official client."""

from __future__ import annotations

import json
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headport.runtime import Generator
from tests.cpp.served import EXTRA, FINISH, MODEL, Served, same
from tests.cpp.test_texts import tokenizer_library


def asked(n: int) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Fields of the API, the generator's options, and a prompt: another of each for every n."""
    tokens = 3 + n % 6
    prompt = [(n * 37 + i * 11) % 256 + 1 for i in range(1 + n % 9)]
    options: dict[str, Any] = (
        {},
        {"temperature": 1.0, "seed": n, "top_k": 20},
        {"temperature": 0.8, "top_p": 0.9, "seed": n},
        {"temperature": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.3, "seed": 5},
        {"temperature": 1.0, "n": 3, "seed": 2**64 - 1, "min_p": 0.02},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "eos_token_id": 7},
        {"bad_words": [[3], [9, 4]], "suppress_tokens": [11], "min_new_tokens": 3},
        {"temperature": 1.0, "seed": n, "stop": ["e", "t", "ab"]},
    )[n % 8]
    fields = options | {"max_tokens": tokens}
    if n % 8 == 6:
        options = options | {"logit_bias": {7: 3.5, 9: -100.0}}
        fields["logit_bias"] = {"7": 3.5, "9": -100.0}
    own = (
        "temperature",
        "seed",
        "top_p",
        "n",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "max_tokens",
        "stop",
    )
    extra = {name: fields.pop(name) for name in list(fields) if name not in own}
    return fields | {"extra_body": extra | EXTRA}, options | {"max_new_tokens": tokens}, prompt


def test_requests_at_once_get_what_the_generator_gives(
    service: Served, generator: Generator
) -> None:
    def ask(n: int) -> Any:
        fields, _, prompt = asked(n)
        return service.ask(prompt, **fields)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(32)))
    for n, answer in enumerate(answers):
        _, options, prompt = asked(n)
        replies = generator.generate([prompt], **options)
        same(answer.choices, replies)
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == sum(len(reply.token_ids) for reply in replies)
        assert answer.object == "text_completion" and answer.model == MODEL


def test_several_prompts(service: Served, generator: Generator) -> None:
    prompts = [[5, 9, 2], [17], [40, 41, 42, 43]]
    options = {"n": 2, "temperature": 1.0, "seed": 4}
    answer = service.ask(prompts, max_tokens=5, extra_body=EXTRA, **options)
    same(answer.choices, generator.generate(prompts, max_new_tokens=5, **options))


def test_a_streamed_answer_is_the_whole_one_in_parts(service: Served, generator: Generator) -> None:
    def ask(n: int) -> list[Any]:
        fields, _, prompt = asked(n)
        usage = {"include_usage": True}
        return list(service.ask(prompt, stream=True, stream_options=usage, **fields))

    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(ask, range(8)))
    for n, (*parts, last) in enumerate(streams):
        _, options, prompt = asked(n)
        replies = generator.generate([prompt], **options)
        assert last.choices == [] and last.usage.prompt_tokens == len(prompt)
        for index, reply in enumerate(replies):
            own = [c.choices[0] for c in parts if c.choices[0].index == index]
            assert [i for choice in own for i in choice.token_ids] == reply.token_ids
            assert "".join(choice.text for choice in own) == reply.text
            assert [c.finish_reason for c in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == FINISH[reply.finish_reason]


def test_likelihoods(service: Served, generator: Generator) -> None:
    common = {"temperature": 1.0, "seed": 2}
    [reply] = generator.generate([[5, 9]], max_new_tokens=6, logprobs=2, **common)
    answer = service.ask([5, 9], max_tokens=6, logprobs=2, **common)
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx([c.logprob for c in reply.logprobs], abs=1e-4)
    assert found.tokens == [generator.spell(i) for i in reply.token_ids]
    lengths = [len(token) for token in found.tokens]
    assert found.text_offset == [sum(lengths[:n]) for n in range(6)]
    for top, choice in zip(found.top_logprobs, reply.logprobs, strict=True):
        expected = {generator.spell(t.token_id): t.logprob for t in choice.top_logprobs}
        assert top == pytest.approx(expected, abs=1e-4)
    stream = service.ask([5, 9], max_tokens=6, logprobs=2, stream=True, **common)
    parts = [token for chunk in stream for token in chunk.choices[0].logprobs.tokens]
    assert parts == found.tokens


def test_texts_go_in_with_a_tokenizer_and_are_refused_without(
    start: Any, service: Served, generator: Generator
) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="this text cannot become token ids here"):
        service.ask("The head")
    with start("--tokenizer", str(tokenizer_library())) as other:
        prompts = ["The head", "def add(a", "naïve"]
        answer = other.ask(prompts, max_tokens=5, temperature=1.0, seed=4, extra_body=EXTRA)
        same(
            answer.choices,
            generator.generate(prompts, max_new_tokens=5, temperature=1.0, seed=4),
        )
        mixed = other.ask([[5, 9, 2], "The head"], max_tokens=3, extra_body=EXTRA)
        same(mixed.choices, generator.generate([[5, 9, 2], "The head"], max_new_tokens=3))


def test_a_bundle_without_a_tokenizer_takes_ids_and_gives_ids(
    start: Any, generator: Generator, tiny_lowered: Path, tmp_path: Path
) -> None:
    import openai

    bare = tmp_path / "bare"
    shutil.copytree(tiny_lowered, bare)
    manifest = json.loads((bare / "manifest.json").read_text())
    del manifest["files"]["tokenizer.json"]
    (bare / "manifest.json").write_text(json.dumps(manifest))
    (bare / "tokenizer.json").unlink()
    [reply] = generator.generate([[5, 9]], max_new_tokens=4)
    with start(bundle=bare) as service:
        answer = service.ask([5, 9], max_tokens=4, extra_body=EXTRA)
        assert answer.choices[0].token_ids == reply.token_ids and answer.choices[0].text == ""
        for fields in ({}, {"extra_body": EXTRA, "logprobs": 1}):
            with pytest.raises(openai.BadRequestError, match="this service has no texts"):
                service.ask([5, 9], **fields)


def test_addresses(service: Served) -> None:
    import openai

    assert [model.id for model in service.client.models.list()] == [MODEL]
    assert service.client.models.retrieve(MODEL).owned_by == "headport"
    with pytest.raises(openai.NotFoundError, match="'tiny' is served here, 'gpt' was asked for"):
        service.client.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match="the service has GET /health"):
        service.client.embeddings.create(model=MODEL, input="a")
    # Only this machine's own address that was asked for is open.
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", int(service.address.rpartition(":")[2])))


def test_replies_without_a_number_are_limited(start: Any) -> None:
    with start("--max-new-tokens", "6") as service:
        answer = service.ask([5], extra_body=EXTRA | {"eos_token_id": []})
    assert len(answer.choices[0].token_ids) == 6
