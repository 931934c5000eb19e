"""The example with a grammar engine: every reply fits, greedy, drawn, in batches and as beams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headport.runtime import Generator

llguidance = pytest.importorskip("llguidance", reason="llguidance drives this example")

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def generator(tiny_bundle: Path) -> Any:
    with Generator(tiny_bundle) as found:
        yield found


def grammar_of(generator: Generator, bundle: Path, schema: Any = PERSON) -> Any:
    from examples.grammar import Grammar

    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_flexible": False}
    )
    size = generator.bundle.manifest.vocabulary.size
    return Grammar(bundle, grammar, size, generator.defaults.eos_token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 5, "n": 3},
        {"temperature": 1.5, "top_p": 0.9, "seed": [1, 2]},
        {"num_beams": 2, "n": 2},
    ],
    ids=str,
)
def test_replies_fit_the_schema(generator, tiny_bundle, options):
    allowed = grammar_of(generator, tiny_bundle)
    prompts = ["A person: ", "b"]
    replies = generator.generate(prompts, allowed=allowed, max_new_tokens=40, **options)
    assert len(replies) == 2 * options.get("n", 1)
    for reply in replies:
        assert reply.finish_reason == "eos"
        found = json.loads(reply.text)
        assert found.keys() == {"name", "old"} and found["name"] in ("Ada", "Grace")


def test_without_it_they_do_not(generator):
    [reply] = generator.generate(["A person: "], max_new_tokens=40)
    with pytest.raises(ValueError, match=r"Expecting|Extra"):
        json.loads(reply.text)


def test_the_example_runs(tiny_bundle):
    from examples.grammar import main

    schema = {"enum": ["yes", "no"]}
    assert json.loads(main(tiny_bundle, "b", schema)) in ("yes", "no")
