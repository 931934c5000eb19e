"""A row that may be continued with few tokens gets what the whole head would give it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.errors import NonFiniteError, RequestError
from headport.runner import open_runner
from headport.runtime.parameters import Parameters
from headport.runtime.results import Stats
from headport.runtime.row import Row
from headport.runtime.sampling.choice import Choice
from headport.runtime.sampling.chooser import LogitsChooser
from headport.runtime.sampling.settings import FixedIds, Sampling
from headport.runtime.sampling.subset import AllowedTokens, SubsetChooser
from headport.runtime.vocabulary import IdMap
from tests.toy_bundles import write_toy

V, H = 211, 24
HIDDEN = np.random.default_rng(2).normal(0, 2, (6, H)).astype(np.float32)


class Counting:
    """A runner that remembers what it was asked for."""

    def __init__(self, bundle: Bundle) -> None:
        self._runner = open_runner(bundle)
        self.rows_of: list[int] = []
        self.whole = 0

    def rows(self, hidden: np.ndarray, token_ids: np.ndarray, name: str = "lm") -> np.ndarray:
        self.rows_of.append(len(token_ids))
        return self._runner.rows(hidden, token_ids, name)

    def head(self, hidden: np.ndarray, name: str = "lm", noise: Any = None) -> Any:
        self.whole += len(hidden)
        return self._runner.head(hidden, name, noise)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    weight = np.random.default_rng(0).normal(size=(V, H)).astype(np.float32)
    return write_toy(tmp_path_factory.mktemp("toy") / "toy", weight)


def row(allowed: Any = None, logprobs: int | None = None, **sampling: Any) -> Row:
    chosen = Sampling(allowed=allowed, **sampling)
    parameters = Parameters(
        sampling=chosen,
        max_new_tokens=4,
        eos_token_ids=frozenset({0}),
        stop=(),
        logprobs=logprobs,
    )
    seed = 11 if sampling.get("temperature") else None
    return Row(0, [5, 9], parameters, seed, None, False)  # type: ignore[arg-type]


def choosers(bundle: Bundle, ids: IdMap) -> tuple[Counting, SubsetChooser, LogitsChooser]:
    runner = Counting(bundle)
    whole = LogitsChooser(runner, "lm", ids)  # type: ignore[arg-type]
    return runner, SubsetChooser(runner, "lm", ids, whole, Stats()), whole


MAPS = {
    "whole": IdMap(V),
    "pruned": IdMap(1000, np.sort(np.random.default_rng(4).permutation(1000)[:V])),
}
SAMPLINGS = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.7, "min_p": 0.1, "logit_bias": (((7,), 2.0),)},
    {"suppress_tokens": (3, 4, 5)},
]


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_few_allowed_tokens_choose_as_the_whole_head_does(bundle, name, sampling):
    ids = MAPS[name]
    runner, subset, whole = choosers(bundle, ids)
    named = (*ids.ids[[3, 50, 51, 120, 200]].tolist(), 7, 999_999)
    rows = [row(FixedIds(named), **sampling) for _ in HIDDEN]
    expected = whole.choose(HIDDEN, rows)
    runner.whole = 0
    assert subset.choose(HIDDEN, rows) == expected
    assert runner.whole == 0 and len(runner.rows_of) == 1
    assert subset.stats.few_rows == len(HIDDEN)
    assert all(isinstance(c, Choice) and c.token_id in named for c in expected)


def test_rows_of_all_sorts_keep_their_order(bundle):
    ids = IdMap(V)
    runner, subset, whole = choosers(bundle, ids)
    first, second = FixedIds((1, 2, 3)), FixedIds((4, 5))
    rows = [
        row(first),
        row(),
        row(second, temperature=1.0),
        row(first, logprobs=2),  # looks at the whole distribution
        row(FixedIds(tuple(range(V)))),  # not few
        row(lambda _: np.array([6])),  # asked at each step
    ]
    assert subset.choose(HIDDEN, rows) == whole.choose(HIDDEN, rows)
    assert runner.rows_of == [3, 2] and runner.whole == 4 + 6
    seen = row(first, process_scores=lambda _c, scores, _i: scores)
    runner.rows_of.clear()
    assert subset.choose(HIDDEN[:1], [seen]) == whole.choose(HIDDEN[:1], [seen])
    assert runner.rows_of == []
    assert np.array_equal(subset.logits(HIDDEN), whole.logits(HIDDEN))


def test_errors_belong_to_their_row(bundle):
    _, subset, _ = choosers(bundle, IdMap(V))
    hidden = HIDDEN[:3].copy()
    hidden[1, 0] = np.nan
    rows = [row(FixedIds((1, 2))), row(FixedIds((1, 2))), row(FixedIds((5000,)))]
    good, broken, nothing = subset.choose(hidden, rows)
    assert isinstance(good, Choice)
    assert isinstance(broken, NonFiniteError)
    assert isinstance(nothing, RequestError)  # bans every token, as the whole head says it


def test_allowed_tokens_are_columns_by_ascending_original_id():
    ids = IdMap(10, np.array([2, 4, 7, 9]))
    found = AllowedTokens.of((9, 3, 7, 7, 2), ids)
    assert found.ids.tolist() == [2, 7, 9]
    assert found.columns.tolist() == [0, 2, 3]


def test_swapped_columns_would_be_noticed(bundle, monkeypatch):
    ids = IdMap(V)
    _, subset, whole = choosers(bundle, ids)
    of = AllowedTokens.of

    def wrong(token_ids: Any, ids: IdMap) -> AllowedTokens:
        found = of(token_ids, ids)
        return AllowedTokens(found.ids, found.columns[::-1])

    monkeypatch.setattr(AllowedTokens, "of", wrong)
    rows = [row(FixedIds((1, 80, 160, 200))) for _ in HIDDEN]
    assert subset.choose(HIDDEN, rows) != whole.choose(HIDDEN, rows)


def test_subsets_are_forgotten_but_never_under_way(bundle, monkeypatch):
    monkeypatch.setattr("headport.runtime.sampling.subset._REMEMBERED", 1)
    _, subset, whole = choosers(bundle, IdMap(V))
    rows = [row(FixedIds((n, n + 9))) for n in range(6)]
    assert subset.choose(HIDDEN, rows) == whole.choose(HIDDEN, rows)
    assert len(subset._known) == 1


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 5}])
def test_a_generator_computes_the_rows_of_few_allowed_tokens_alone(tiny_bundle, options):
    from headport.runtime import Generator
    from headport.session_runner import SessionRunner

    asked: list[int] = []
    rows = SessionRunner.rows

    def watch(self: Any, hidden: Any, token_ids: Any, name: str = "lm") -> Any:
        asked.append(len(token_ids))
        return rows(self, hidden, token_ids, name)

    few = [3, 60, 61, 90, 200]
    with pytest.MonkeyPatch.context() as patch, Generator(tiny_bundle) as generator:
        patch.setattr(SessionRunner, "rows", watch)
        [reply] = generator.generate("The head", allowed=few, max_new_tokens=6, **options)
        count, counted = len(asked), generator.stats.few_rows
        # A likelihood needs the whole head, which chooses the same tokens.
        [whole] = generator.generate(
            "The head", allowed=few, max_new_tokens=6, logprobs=0, **options
        )
    assert asked == [len(few)] * count and count >= counted == len(reply.token_ids) > 0
    assert len(asked) == count and reply.token_ids == whole.token_ids
    assert set(reply.token_ids) <= set(few)
