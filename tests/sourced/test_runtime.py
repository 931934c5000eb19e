"""Encoder-decoder bundles against transformers: greedy, sampled and beam-searched replies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.errors import BundleError, PromptError, RequestError
from headport.runner import open_runner
from headport.runtime import Generator
from headport.runtime.sampling.noise import NoiseKey, draw_bits, gumbel
from tests.sourced.models import (
    BINS,
    END,
    FRAMES,
    LONGEST,
    MAIN,
    START,
    VOCAB_SIZE,
    load,
    reply_of_transformers,
    sources,
)

NEW = 8


@pytest.fixture(scope="session")
def generator(bundle: Callable[[str], Path]) -> Callable[[str], Generator]:
    from functools import cache

    return cache(lambda name: Generator(bundle(name), threads=1, slots=4))


@pytest.fixture(scope="session")
def model(checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    from functools import cache

    return cache(lambda name: load(checkpoint(name)))


@pytest.mark.parametrize("name", MAIN)
def test_fifty_greedy_replies_are_those_of_transformers(name, generator, model):
    given = sources(name, 50)
    replies = generator(name).generate(given, max_new_tokens=NEW)
    wanted = [
        reply_of_transformers(model(name), each, max_new_tokens=NEW, do_sample=False)[0]
        for each in given
    ]
    assert [reply.token_ids for reply in replies] == wanted
    assert len({tuple(reply.token_ids) for reply in replies}) > 10
    assert all(reply.prompt_token_ids == [START] for reply in replies)


@pytest.mark.parametrize("name", MAIN)
def test_beams_are_those_of_transformers(name, generator, model):
    # 52 sources in all; `benchmarks.encoder_decoder` runs 50 of each kind.
    given, beams, n = sources(name, 13, seed=6), {"num_beams": 3, "length_penalty": 2.0}, 3
    replies = generator(name).generate(given, max_new_tokens=NEW, n=n, **beams)
    for place, each in enumerate(given):
        wanted = reply_of_transformers(
            model(name), each, max_new_tokens=NEW, do_sample=False, num_return_sequences=n, **beams
        )
        found = [reply.token_ids for reply in replies[place * n : place * n + n]]
        assert found == wanted, place


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_lowered_bundles_give_the_same_replies(name, generator, lowered):
    given = sources(name, 12, seed=7)
    fast = Generator(lowered(name), threads=1, slots=4)
    for options in ({}, {"num_beams": 3, "n": 2}, {"temperature": 1.0, "seed": 4, "n": 2}):
        wanted = generator(name).generate(given, max_new_tokens=NEW, **options)
        found = fast.generate(given, max_new_tokens=NEW, **options)
        assert [r.token_ids for r in found] == [r.token_ids for r in wanted], options


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_sampled_tokens_are_drawn_from_the_models_distribution(name, generator, model):
    import torch
    from transformers.generation.logits_process import TopKLogitsWarper

    given, seed, temperature = sources(name, 6, seed=8), 21, 0.9
    options = {"temperature": temperature, "top_k": 20, "seed": seed}
    replies = generator(name).generate(given, max_new_tokens=NEW, **options)
    banned = [7, 9] if name == "whisper" else []
    for each, reply in zip(given, replies, strict=True):
        ids = [START, *reply.token_ids]
        key = "input_ids" if isinstance(each, list) else "input_features"
        inputs = {key: torch.tensor(np.asarray(each))[None]}
        with torch.no_grad():
            logits = model(name)(**inputs, decoder_input_ids=torch.tensor([ids])).logits[0]
        for step, token in enumerate(reply.token_ids):
            scores = logits[step].clone()
            scores[banned + ([11, END] if banned and step == 0 else [])] = -np.inf
            kept = TopKLogitsWarper(20)(None, scores[None] / temperature)[0].double().numpy()
            noise = gumbel(draw_bits(NoiseKey(seed, step, 0), VOCAB_SIZE))
            assert int(np.argmax(kept + noise)) == token


@pytest.mark.parametrize("name", MAIN)
def test_a_row_beside_others_is_the_row_alone(name, generator):
    given = sources(name, 4, seed=9)
    options = {"max_new_tokens": NEW, "eos_token_id": (), "temperature": 1.0, "seed": [1, 2, 3, 4]}
    together = generator(name).generate(given, **options)
    for n, each in enumerate(given):
        [alone] = generator(name).generate([each], **(options | {"seed": n + 1}))
        assert together[n] == alone


@pytest.mark.parametrize("kind", ["bundle", "lowered"])
def test_a_source_is_encoded_once(kind, request):
    made = Generator(request.getfixturevalue(kind)("bart"), threads=1, slots=3)
    given = sources("bart", 5)
    made.generate(given, max_new_tokens=NEW, temperature=1.0, n=3, seed=1)
    assert made.stats.encoder_runs == 5  # not one per sample, nor one per step
    assert made.stats.source_tokens == sum(map(len, given))
    made.generate(given[:2], max_new_tokens=NEW, num_beams=4, n=4)
    assert made.stats.encoder_runs == 7  # nor one per beam
    assert made.stats.encoder_runs == made._runner.encoder.runs


def test_beams_share_the_arrays_of_their_source(bundle):
    runner = open_runner(Bundle.open(bundle("bart")))
    [encoded] = runner.encoder.encode([np.arange(3, 9)])
    cache = runner.new_cache(4, 8)
    cache.sources.fill(encoded)
    before = runner._backbone.run
    seen: list[Any] = []

    def watched(feeds: Any, *rest: Any) -> Any:
        seen.append(feeds)
        return before(feeds, *rest)

    runner._backbone.run = watched
    ones = np.ones(4, np.int64)
    runner.forward(cache, np.full((4, 1), START), ones)
    runner.reorder(cache, np.array([3, 3, 0, 1]))
    runner.forward(cache, np.arange(5, 9)[:, None], ones)
    for feeds in seen:
        for name, array in encoded.arrays.items():
            assert feeds[name] is array and array.shape[0] == 1


def test_slots_let_go_of_what_they_read(generator):
    made = generator("t5")
    made.generate(sources("t5", 6), max_new_tokens=3)
    table = made._scheduler._worker._table
    assert table is not None
    assert table.slots.sources._held == [None] * 4


def test_logits_and_scores_of_given_tokens(generator, model):
    import torch

    [source] = sources("marian", 1)
    ids = [START, 5, 99, 12, END]
    with torch.no_grad():
        wanted = (
            model("marian")(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids]))
            .logits[0]
            .double()
        )
    found = generator("marian").logits(ids, source=source)
    assert np.abs(found - wanted.numpy()).max() < 2e-4 * float(wanted.abs().max())
    [score] = generator("marian").score([ids], sources=[source])
    nll = torch.nn.functional.cross_entropy(wanted[:-1], torch.tensor(ids[1:]), reduction="none")
    np.testing.assert_allclose(score.nll[1:], nll.numpy(), rtol=1e-3, atol=1e-3)


def test_the_last_token_is_forced_where_the_bundle_says_so(generator, model):
    given = sources("bart", 4)
    replies = generator("bart").generate(given, max_new_tokens=3, eos_token_id=END)
    assert all(r.token_ids[-1] == END and r.finish_reason == "eos" for r in replies)
    assert model("bart").generation_config.forced_eos_token_id == END


def test_a_first_token_may_be_forced(bundle, model):
    made = with_defaults(bundle("marian"), forced_bos_token_id=77, begin_suppress_tokens=[3])
    given = sources("marian", 5)
    for options in ({}, {"num_beams": 3, "length_penalty": 2.0}):
        replies = made.generate(given, max_new_tokens=NEW, **options)
        wanted = [
            reply_of_transformers(
                model("marian"),
                each,
                max_new_tokens=NEW,
                do_sample=False,
                forced_bos_token_id=77,
                begin_suppress_tokens=[3],
                **options,
            )[0]
            for each in given
        ]
        assert [r.token_ids for r in replies] == wanted
        assert all(ids[0] == 77 for ids in wanted)


def with_defaults(folder: Path, **changes: Any) -> Generator:
    import msgspec

    bundle = Bundle.open(folder)
    defaults = bundle.manifest.defaults | changes
    manifest = msgspec.structs.replace(bundle.manifest, defaults=defaults)
    return Generator(Bundle(bundle.path, manifest), threads=1)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_a_reply_may_begin_as_the_call_says(name, generator, model):
    import torch

    [source] = sources(name, 1)
    start = [START, 40, 41]
    [wanted] = reply_of_transformers(
        model(name),
        source,
        max_new_tokens=NEW,
        do_sample=False,
        decoder_input_ids=torch.tensor([start]),
    )
    for prefix in ([40, 41], start):
        [found] = generator(name).generate([source], prefix=prefix, max_new_tokens=NEW)
        assert found.token_ids == wanted and found.prompt_token_ids == start


def test_texts_are_read_with_the_bundles_tokenizer(generator):
    made = generator("t5")
    [by_text] = made.generate("The head", max_new_tokens=3)
    [by_ids] = made.generate([made.encode("The head")], max_new_tokens=3)
    assert by_text == by_ids
    [stream] = [made.stream("The head", max_new_tokens=3)]
    assert [token.token_id for token in stream] == by_text.token_ids


def test_other_rules_look_at_the_decoders_tokens_only(generator, model):
    given = sources("marian", 6, seed=10)
    rules = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    replies = generator("marian").generate(given, max_new_tokens=NEW, **rules)
    wanted = [
        reply_of_transformers(model("marian"), each, max_new_tokens=NEW, do_sample=False, **rules)[
            0
        ]
        for each in given
    ]
    assert [r.token_ids for r in replies] == wanted


WRONG_TEXT = [
    ([[]], "source 0 is empty"),
    ([[5], [VOCAB_SIZE]], "source 1 holds 257, ids from 0 to 256"),
    ([[5] * (LONGEST + 1)], "source 0 has 41 tokens, the encoder holds 40; shorten it"),
    ([np.zeros((BINS, FRAMES), np.float32)], "source 0"),
]


@pytest.mark.parametrize(("given", "message"), WRONG_TEXT, ids=[m for _, m in WRONG_TEXT])
def test_wrong_sources_of_ids_are_named(given, message, generator):
    with pytest.raises(PromptError, match=message):
        generator("bart").generate(given)


WRONG_FEATURES = [
    ("a text", "source 0 is str, input features"),
    ([np.zeros((BINS, FRAMES + 1), np.float32)], r"source 0 is \[6, 25\]"),
    ([np.full((BINS, FRAMES), np.nan, np.float32)], "not finite"),
    ([np.zeros((BINS, FRAMES), np.int64)], "source 0 is int64"),
    ([], "at least one source"),
]


@pytest.mark.parametrize(("given", "message"), WRONG_FEATURES, ids=[m for _, m in WRONG_FEATURES])
def test_wrong_features_are_named(given, message, generator):
    with pytest.raises(PromptError, match=message):
        generator("whisper").generate(given)


def test_features_may_come_in_one_array(generator):
    several = np.stack(sources("whisper", 2))
    made = generator("whisper")
    assert made.generate(several, max_new_tokens=3) == made.generate(
        list(several), max_new_tokens=3
    )
    assert made.generate(several[0], max_new_tokens=3)[0].token_ids


def test_long_sources_are_read_where_positions_are_relative(generator, model):
    source = np.random.default_rng(3).integers(3, VOCAB_SIZE, 200).tolist()
    [reply] = generator("t5").generate([source], max_new_tokens=NEW)
    [wanted] = reply_of_transformers(model("t5"), source, max_new_tokens=NEW, do_sample=False)
    assert reply.token_ids == wanted


def test_what_has_no_use_is_refused(generator, tiny_bundle):
    plain = Generator(tiny_bundle, threads=1)
    with pytest.raises(RequestError, match="prefix is for bundles of encoder-decoder models"):
        plain.generate("The head", prefix=[3])
    with pytest.raises(RequestError, match="reads no source"):
        plain.logits([3], source=[4])
    with pytest.raises(PromptError, match="source they answer to"):
        generator("t5").logits([START])


def test_a_start_must_be_stated(bundle):
    import msgspec

    opened = Bundle.open(bundle("t5"))
    defaults = {k: v for k, v in opened.manifest.defaults.items() if k != "decoder_start_token_id"}
    manifest = msgspec.structs.replace(opened.manifest, defaults=defaults)
    with pytest.raises(BundleError, match="must state decoder_start_token_id"):
        Generator(Bundle(opened.path, manifest))
