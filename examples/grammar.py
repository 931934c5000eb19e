"""A reply that follows a grammar: llguidance drives the sampler through the option `allowed`.

    python -m examples.grammar BUNDLE "A person as JSON: "

Needs `pip install llguidance`. Any engine that can say which tokens may follow works the same way.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from headport.runtime import Context, Generator

__all__ = ["Grammar", "main"]

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Grammar:
    """Which tokens may follow, for `generate(…, allowed=Grammar(…))`.

    It is asked with the row's tokens at each step, so one object serves any number of rows: each
    prompt and sample has a matcher of its own, which is fed what is new. Where tokens are not what
    they were, as with the beams of a search, the matcher begins anew.

    Args:
        bundle: The bundle's folder, for its tokenizer.
        grammar: As `LLMatcher.grammar_from_json_schema` and its like give it.
        vocab_size: True size of the vocabulary.
        eos_token_ids: What may follow a complete text.
    """

    def __init__(
        self, bundle: Path, grammar: str, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        source = (bundle / "tokenizer.json").read_text(encoding="utf-8")
        self._tokenizer = LLTokenizer(source, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._ends = eos_token_ids
        self._rows: dict[tuple[int, int], tuple[list[int], LLMatcher]] = {}

    def __call__(self, context: Context) -> npt.NDArray[np.bool_] | tuple[int, ...]:
        """A mask over the vocabulary; the end tokens where the text is complete."""
        row, tokens = (context.index, context.sample), list(context.token_ids)
        fed, matcher = self._rows.get(row, (tokens, None))
        if matcher is None or tokens[: len(fed)] != fed:
            fed, matcher = [], LLMatcher(self._tokenizer, self._grammar)
        if not matcher.consume_tokens(tokens[len(fed) :]):
            raise ValueError(f"the grammar refused a token: {matcher.get_error()}")
        self._rows[row] = (tokens, matcher)
        if matcher.is_stopped():
            return self._ends
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)


def main(bundle: Path, prompt: str, schema: object = PERSON) -> str:
    """Continue a prompt with JSON that fits a schema."""
    with Generator(bundle) as generator:
        size = generator.bundle.manifest.vocabulary.size
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        allowed = Grammar(bundle, grammar, size, generator.defaults.eos_token_ids)
        [reply] = generator.generate([prompt], allowed=allowed, max_new_tokens=60)
    return reply.text


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2]))
