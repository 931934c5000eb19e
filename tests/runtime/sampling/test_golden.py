"""`sampler.json`, made with transformers, holds for this sampler: all of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headport.errors import RequestError
from headport.runtime.sampling import filters, processors
from headport.runtime.sampling.beam_state import BeamState
from headport.runtime.sampling.filters import FILTERS, keep, log_softmax
from headport.runtime.sampling.noise import NoiseKey, draw_bits, gumbel
from headport.runtime.sampling.processors import PROCESSORS, apply_processors
from headport.runtime.sampling.sampler import choose
from headport.runtime.sampling.settings import Beams, Context, FixedIds, Sampling, read_bias
from tests.runtime.golden import FILE

VECTORS: dict[str, Any] = json.loads(FILE.read_text())
TABLE = np.array(VECTORS["table"], np.float32)
IDS = np.arange(len(TABLE))


def sampling_of(options: dict[str, Any]) -> Sampling:
    read = {
        "logit_bias": read_bias,
        "allowed": lambda ids: FixedIds(tuple(ids)),
        "bad_words": lambda words: tuple(map(tuple, words)),
        "suppress_tokens": tuple,
        "begin_suppress_tokens": tuple,
        "forced_eos": tuple,
    }
    return Sampling(**{k: read[k](v) if k in read else v for k, v in options.items()})


def named(cases: list[dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(c, id=c.get("name") or str(c.get("options", n))) for n, c in enumerate(cases)
    ]


@pytest.mark.parametrize("case", named(VECTORS["rows"]))
def test_rows(case):
    check_row(case)


def check_row(case: dict[str, Any]) -> None:
    logits = np.array(case["logits"], np.float32)
    sampling = sampling_of(case["options"])
    limit = case.get("limit", 0)
    context = Context(case["prompt"], case["tokens"], tuple(case["eos"]), max_new_tokens=limit)
    scores = apply_processors(logits.astype(np.float64), IDS, sampling, context)
    wanted = np.array([-np.inf if s is None else s for s in case["scores"]])
    assert (np.isinf(scores) == np.isinf(wanted)).all()
    np.testing.assert_allclose(scores, wanted, rtol=1e-6, atol=1e-6)
    if not case["kept"]:
        with pytest.raises(RequestError, match="ban every token"):
            choose(logits, IDS, sampling, None, context)
        return
    if "greedy" in case:
        assert choose(logits, IDS, sampling, None, context) == case["greedy"]
        return
    alive = np.flatnonzero(scores > -np.inf)
    assert alive[keep(scores[alive], sampling)].tolist() == case["kept"]
    for seed, step, sample, token in case["draws"]:
        key = NoiseKey(seed, step, sample)
        assert choose(logits, IDS, sampling, key, context) == token


def test_noise():
    for case in VECTORS["noise"]:
        key = NoiseKey(case["seed"], case["step"], case["sample"])
        bits = draw_bits(key, case["id"] + 1)[case["id"]]
        assert bits == case["bits"]
        assert gumbel(np.array([bits]))[0] == pytest.approx(case["g"], abs=1e-12)


@pytest.mark.parametrize("case", named(VECTORS["generations"]))
def test_generations(case):
    sampling, prompt, tokens = sampling_of(case["options"]), case["prompt"], []
    while len(tokens) < case["limit"] and not (tokens and tokens[-1] in case["eos"]):
        key = NoiseKey(case["seed"], len(tokens)) if "seed" in case else None
        context = Context(prompt, tokens, tuple(case["eos"]))
        logits = TABLE[(prompt + tokens)[-1]]
        tokens.append(choose(logits, IDS, sampling, key, context))
    assert tokens == case["tokens"]


@pytest.mark.parametrize(
    "case", VECTORS["beams"], ids=lambda c: " ".join(map(str, list(c.values())[:3]))
)
def test_beams(case):
    beams = Beams(case["num_beams"], case["length_penalty"], case["early_stopping"])
    limit, ends = case["limit"], set(case["eos"])
    state = BeamState(beams, limit, len(ends), lambda t: t[-1] in ends or len(t) == limit)
    while not state.done:
        last = [(beam.token_ids or case["prompt"])[-1] for beam in state.open]
        state.advance(np.stack([log_softmax(TABLE[token]) for token in last]), IDS)
    found = state.best(beams.num_beams)
    assert [list(each.token_ids) for each in found] == case["replies"]
    assert [each.score for each in found] == pytest.approx(case["scores"], abs=1e-4)


def _without(table: Any, name: str) -> Any:
    return tuple(each for each in table if each.name != name)


def _swapped(table: Any, first: str, second: str) -> Any:
    names = [each.name for each in table]
    order = list(table)
    one, other = names.index(first), names.index(second)
    order[one], order[other] = order[other], order[one]
    return tuple(order)


ELSEWHERE = {"process_scores"}  # the caller's own
FAULTS = [
    *(("processors", _without, (p.name,)) for p in PROCESSORS if p.name not in ELSEWHERE),
    *(("filters", _without, (f.name,)) for f in FILTERS),
    ("processors", _swapped, ("logit_bias", "repetition_penalty")),
    ("processors", _swapped, ("repetition_penalty", "presence_and_frequency_penalty")),
    ("processors", _swapped, ("bad_words", "allowed")),
    ("processors", _swapped, ("allowed", "forced_bos, forced_eos")),
    ("processors", _swapped, ("forced_bos, forced_eos", "suppress_tokens")),
    ("filters", _swapped, ("top_k", "top_p")),
    ("filters", _swapped, ("top_p", "min_p")),
    ("filters", _swapped, ("min_p", "typical_p")),
    ("filters", _swapped, ("typical_p", "epsilon_cutoff")),
    ("filters", _swapped, ("epsilon_cutoff", "eta_cutoff")),
]


@pytest.mark.parametrize(
    ("module", "change", "names"), FAULTS, ids=lambda v: getattr(v, "__name__", str(v)[:40])
)
def test_a_fault_of_a_table_fails_some_vector(module, change, names, monkeypatch):
    where = {"processors": processors, "filters": filters}[module]
    monkeypatch.setattr(where, module.upper(), change(getattr(where, module.upper()), *names))
    # Also where an error was expected and none comes.
    with pytest.raises((AssertionError, RequestError, pytest.fail.Exception)):
        for case in VECTORS["rows"]:
            check_row(case)


def test_every_processor_and_filter_has_vectors():
    options = {name for case in VECTORS["rows"] for name in case["options"]}
    neutral = Sampling()
    unknown = {f for f in vars(neutral) if f not in options}
    assert unknown == {"process_scores"}
    acting = {
        p.name
        for case in VECTORS["rows"]
        for p in PROCESSORS
        if p.acts(sampling_of(case["options"]))
    }
    assert acting == {p.name for p in PROCESSORS} - ELSEWHERE


def test_the_vectors_are_what_transformers_gives_today():
    transformers = pytest.importorskip("transformers")
    made_with = VECTORS["made_with"]["transformers"]
    if transformers.__version__ != made_with:
        pytest.skip(f"made with transformers {made_with}, {transformers.__version__} is installed")
    from tests.runtime.golden.make import make

    assert json.loads(json.dumps(make())) == VECTORS
    assert FILE.stat().st_size < 300_000
