"""Rows of different requests in one call: each gets its own choice, or its own error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.errors import NonFiniteError, RequestError
from headport.runtime.generation_config import Defaults
from headport.runtime.parameters import resolve
from headport.runtime.results import Stats
from headport.runtime.row import Row
from headport.runtime.sampling.choice import Choice
from headport.runtime.sampling.chooser import make_chooser
from headport.runtime.text import TextStream, Tokens
from headport.runtime.vocabulary import IdMap
from tests.runtime.conftest import VOCAB_SIZE, TableRunner, manifest

REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3, "seed": 3},
    {"temperature": 1.0, "typical_p": 0.5, "seed": 4, "n": 3},
    {"no_repeat_ngram_size": 1, "suppress_tokens": [7, 8]},
    {"temperature": 1.0, "seed": 9, "allowed": lambda c: [len(c.token_ids), 100, 200]},
    {"temperature": 1.2, "seed": 1, "presence_penalty": 1.0, "logprobs": 3},
)


@pytest.fixture
def bundle(bundle_folder):
    return Bundle(bundle_folder, manifest())


def rows_of(bundle: Bundle, requests: Any = REQUESTS) -> list[Row]:
    tokens, found = Tokens(bundle), []
    for index, options in enumerate(requests):
        request = resolve({"max_new_tokens": 8, "eos_token_id": (), **options}, Defaults(), 1)  # type: ignore[typeddict-item]
        for sample in range(request.n):
            seed = request.seeds[0] if request.seeds else None
            found.append(
                Row(
                    index,
                    [30 + index, 40],
                    request.parameters(8),
                    seed,
                    TextStream(tokens),
                    False,
                    sample=sample,
                )
            )
    return found


def chooser_of(bundle: Bundle, runner: TableRunner) -> Any:
    ids = IdMap.from_bundle(bundle)
    return make_chooser(runner, "lm", bundle.manifest.heads["lm"], ids, Stats(), exact=False)


def states(rows: list[Row]) -> np.ndarray:
    """What the table runner calls hidden states: last token and position."""
    past = [[*row.prompt_token_ids, *row.token_ids] for row in rows]
    return np.array([[tokens[-1], len(tokens) - 1] for tokens in past], np.float32)


def continue_all(chooser: Any, rows: list[Row], batches: int) -> list[list[int]]:
    for _ in range(8):
        for batch in range(batches):
            some = rows[batch::batches]
            if some:
                for row, choice in zip(some, chooser.choose(states(some), some), strict=True):
                    row.accept(choice)
    return [row.token_ids for row in rows]


@pytest.mark.parametrize("batches", [2, 5, 9])
def test_a_rows_tokens_do_not_depend_on_its_batch(bundle, table, batches):
    chooser = chooser_of(bundle, TableRunner(table))
    together = continue_all(chooser, rows_of(bundle), 1)
    assert continue_all(chooser, rows_of(bundle), batches) == together
    assert continue_all(chooser, rows_of(bundle)[::-1], 1)[::-1] == together


def test_samples_of_one_prompt_differ(bundle, table):
    rows = rows_of(bundle)
    continue_all(chooser_of(bundle, TableRunner(table)), rows, 1)
    samples = [tuple(row.token_ids) for row in rows if row.index == 3]
    assert len(set(samples)) == 3


def test_a_row_that_fails_leaves_the_others(bundle, table):
    def broken(context: Any) -> Any:
        raise KeyError("grammar")

    requests = (
        {},
        {"allowed": broken},
        {"suppress_tokens": list(range(VOCAB_SIZE))},
        {"allowed": lambda c: []},
        {},
        {"temperature": 1.0, "seed": 1},
    )
    rows = rows_of(bundle, requests)
    rows[4].prompt_token_ids = [30, 41]
    damaged = table.copy()
    damaged[41, 3] = np.inf
    found = chooser_of(bundle, TableRunner(damaged)).choose(states(rows), rows)
    kinds = [type(each) for each in found]
    assert kinds == [Choice, RequestError, RequestError, RequestError, NonFiniteError, Choice]
    messages = [str(each) for each in found[1:5]]
    assert "callback of prompt 1, step 0 failed: KeyError: 'grammar'" in messages[0]
    assert "prompt 2, step 0: the request's rules ban every token" in messages[1]
    assert "allows no token" in messages[2]
    assert "row 4, step 0" in messages[3]
    assert all(row.token_ids == [] for row in rows)  # choosing changes no row


def test_a_callback_is_asked_once_per_row_and_step(bundle, table):
    asked = []

    def allowed(context: Any) -> list[int]:
        asked.append((context.index, context.sample, tuple(context.token_ids)))
        return [5, 6, 7]

    rows = rows_of(bundle, [{"temperature": 1.0, "seed": 1, "n": 2, "allowed": allowed}])
    continue_all(chooser_of(bundle, TableRunner(table)), rows, 1)
    assert len(asked) == len(set(asked)) == 16
    assert {sample for _, sample, _ in asked} == {0, 1}
    assert all(set(row.token_ids) <= {5, 6, 7} for row in rows)


def test_likelihoods_are_of_the_model_and_of_the_draw(bundle, table):
    request = {"temperature": 0.5, "top_k": 3, "seed": 1, "logprobs": 2, "suppress_tokens": [4]}
    [row] = rows_of(bundle, [request])
    [choice] = chooser_of(bundle, TableRunner(table)).choose(states([row]), [row])
    z = table[40].astype(np.float32) * np.float32(1.01)
    z = z.astype(np.float64)
    model = z - np.log(np.exp(z).sum())
    assert choice.logprob == pytest.approx(model[choice.token_id], abs=1e-6)
    best = np.argsort(-z)[:2]
    assert [top.token_id for top in choice.top_logprobs] == best.tolist()
    assert [top.logprob for top in choice.top_logprobs] == pytest.approx(model[best], abs=1e-6)
    z[4] = -np.inf
    kept = np.argsort(-z)[:3]
    drawn = z[kept] / 0.5 - np.log(np.exp(z[kept] / 0.5).sum())
    wanted = drawn[kept.tolist().index(choice.token_id)]
    assert choice.processed_logprob == pytest.approx(wanted, abs=1e-6)
    token = row.accept(choice)
    assert (token.logprob, token.top_logprobs) == (choice.logprob, choice.top_logprobs)
    assert row.logprobs == [choice]


def test_nothing_is_told_where_nothing_was_asked(bundle, table):
    [row] = rows_of(bundle, [{}])
    [choice] = chooser_of(bundle, TableRunner(table)).choose(states([row]), [row])
    assert choice == Choice(int(np.argmax(table[40])))
    row.accept(choice)
    assert row.logprobs == []
