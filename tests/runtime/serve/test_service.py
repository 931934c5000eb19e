"""The service, driven by the official client: the generator's answers, and clear refusals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headport.runtime import Generation, Generator
from tests.runtime.serve.conftest import EXTRA, MODEL

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


@pytest.fixture(scope="module")
def other(tiny_lowered: Path) -> Generator:
    """What the service's answers are held against."""
    return Generator(tiny_lowered, threads=1, slots=8)


def asked(n: int) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Fields of the API, the generator's options, and a prompt: another of each for every n."""
    tokens = 3 + n % 6
    prompt = [(n * 37 + i * 11) % 256 + 1 for i in range(1 + n % 9)]
    shared = (
        {},
        {"temperature": 1.0, "seed": n},
        {"temperature": 0.8, "top_p": 0.9, "seed": n, "stop": ["e", "t"]},
        {"temperature": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.3, "seed": 5},
        {"temperature": 1.0, "n": 3, "seed": n},
        {"logit_bias": {7: 3.5, 9: -100.0}},
    )[n % 6]
    own = ({}, {"top_k": 20}, {"min_p": 0.02, "repetition_penalty": 1.2})[n % 3]
    if "temperature" not in shared:
        own = {}
    fields = shared | {"max_tokens": tokens, "extra_body": own | EXTRA}
    if "logit_bias" in shared:
        fields["logit_bias"] = {str(k): v for k, v in shared["logit_bias"].items()}
    return fields, shared | own | {"max_new_tokens": tokens}, prompt


def same(choices: Any, replies: list[Generation]) -> None:
    assert len(choices) == len(replies)
    for choice, reply in zip(choices, replies, strict=True):
        assert choice.token_ids == reply.token_ids
        assert choice.text == reply.text
        assert choice.finish_reason == FINISH[reply.finish_reason]


def test_32_requests_at_once_get_what_the_generator_gives(
    service: Any, other: Generator, generator: Generator
) -> None:
    def ask(n: int) -> Any:
        fields, _, prompt = asked(n)
        return service.completions.create(model=MODEL, prompt=prompt, **fields)

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(32)))
    for n, answer in enumerate(answers):
        _, options, prompt = asked(n)
        replies = other.generate([prompt], **options)
        same(answer.choices, replies)
        new = sum(len(reply.token_ids) for reply in replies)
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == new
        assert answer.object == "text_completion" and answer.model == MODEL
    assert generator.stats.most_rows == 8


def test_a_streamed_answer_is_the_whole_one_in_parts(service: Any, other: Generator) -> None:
    def ask(n: int) -> list[Any]:
        fields, _, prompt = asked(n)
        stream = service.completions.create(
            model=MODEL,
            prompt=prompt,
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        )
        return list(stream)

    with ThreadPoolExecutor(12) as pool:
        streams = list(pool.map(ask, range(12)))
    for n, chunks in enumerate(streams):
        _, options, prompt = asked(n)
        replies = other.generate([prompt], **options)
        *parts, last = chunks
        assert last.choices == [] and last.usage.prompt_tokens == len(prompt)
        for index, reply in enumerate(replies):
            own = [c.choices[0] for c in parts if c.choices[0].index == index]
            assert "".join(choice.text for choice in own) == reply.text
            assert [i for choice in own for i in choice.token_ids] == reply.token_ids
            assert [c.finish_reason for c in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == FINISH[reply.finish_reason]


def test_texts_and_several_prompts(service: Any, other: Generator) -> None:
    prompts = ["The head", "def add(a", "a"]
    answer = service.completions.create(
        model=MODEL, prompt=prompts, n=2, temperature=1.0, seed=4, max_tokens=5, extra_body=EXTRA
    )
    options = {"n": 2, "temperature": 1.0, "seed": 4, "max_new_tokens": 5}
    same(answer.choices, other.generate(prompts, **options))
    assert [choice.index for choice in answer.choices] == list(range(6))


def test_a_chat(service: Any, other: Generator) -> None:
    messages = [
        {"role": "system", "content": "naïve"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "caf"}, {"type": "text", "text": "é"}],
        },
    ]
    plain = [{"role": "system", "content": "naïve"}, {"role": "user", "content": "café"}]
    [reply] = other.generate([other.chat_ids(plain)], max_new_tokens=9, temperature=1.0, seed=2)
    common = {"model": MODEL, "messages": messages, "temperature": 1.0, "seed": 2}
    answer = service.chat.completions.create(max_completion_tokens=9, **common)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", reply.text)
    assert choice.finish_reason == FINISH[reply.finish_reason]
    chunks = list(service.chat.completions.create(max_tokens=9, stream=True, **common))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == reply.text
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_likelihoods(service: Any, other: Generator) -> None:
    common = {"temperature": 1.0, "seed": 2}
    [reply] = other.generate(["a"], max_new_tokens=4, logprobs=2, **common)
    expected = [choice.logprob for choice in reply.logprobs]
    answer = service.completions.create(model=MODEL, prompt="a", max_tokens=4, logprobs=2, **common)
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert found.tokens == [other.spell(i) for i in reply.token_ids]
    assert [len(top) for top in found.top_logprobs] == [2] * 4
    messages = [{"role": "user", "content": "a"}]
    answer = service.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=4, logprobs=True, top_logprobs=3, **common
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 4 and all(len(each.top_logprobs) == 3 for each in content)
    best = [max(each.top_logprobs, key=lambda t: t.logprob).logprob for each in content]
    assert all(each.logprob <= top + 1e-9 for each, top in zip(content, best, strict=True))


def test_the_models(service: Any) -> None:
    import openai

    assert [model.id for model in service.models.list()] == [MODEL]
    assert service.models.retrieve(MODEL).owned_by == "headport"
    with pytest.raises(openai.NotFoundError, match="'tiny' is served here, 'gpt' was asked for"):
        service.models.retrieve("gpt")


def test_fields_that_ask_for_nothing_are_taken(service: Any) -> None:
    answer = service.completions.create(
        model=MODEL, prompt="a", max_tokens=1, best_of=1, echo=False, suffix=None, user="someone"
    )
    assert len(answer.choices) == 1
    service.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a"}],
        max_tokens=1,
        response_format={"type": "text"},
        tools=[],
        store=False,
        metadata={"a": "b"},
    )
