"""Generation over candidates: proved, else by the full product, and every token counted."""

import numpy as np
import pytest

from headport.errors import BundleError, NonFiniteError, RequestError

MODES = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 5},
    "hot": {"temperature": 1.5, "seed": 5},
    "top_k": {"temperature": 1.0, "top_k": 20, "seed": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.9, "seed": 5},
    "min_p": {"temperature": 1.0, "min_p": 0.1, "seed": 5},
}


def tokens(generator, **options):
    found = generator.generate(["ab", "c"], max_new_tokens=20, eos_token_id=(), **options)
    return [each.token_ids for each in found]


@pytest.mark.parametrize("doubt", [0.0, 0.3, 1e9])
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_exact_tokens_are_those_of_all_logits(make, options, doubt):
    full, exact = make(), make(count=60, doubt=doubt)
    assert exact.exact and not full.exact
    assert tokens(exact, **options) == tokens(full, **options)
    stats = exact.stats
    assert stats.certified + stats.fallbacks == stats.new_tokens == 40
    assert stats.unproved == 0
    assert stats.fallbacks == exact._runner.full_rows
    if doubt == 0.0:
        assert stats.certified > 30
    if doubt == 1e9:
        assert stats.fallbacks == 40


RULES = {
    "repetition": {"repetition_penalty": 1.4},
    "repetition rewarded": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 2.0, "frequency_penalty": 0.5},
    "presence rewarded": {"presence_penalty": -1.5},
    "bias": {"logit_bias": {5: 4.0, 70: -3.0, (3, 9): 2.0}},
    "words": {"bad_words": [[12], [40, 41]], "suppress_tokens": [3, 4, 5]},
    "ngrams": {"no_repeat_ngram_size": 1},
    "few allowed": {"allowed": [200, 201, 202]},
    "many allowed": {"allowed": list(range(0, 250, 2))},
    "asked": {"allowed": lambda context: np.arange(257) % 3 == len(context.token_ids) % 3},
    "overruled": {"allowed": [200, 201], "bad_words": [[200], [201]]},
}


@pytest.mark.parametrize("doubt", [0.0, 0.3])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_processed_tokens_are_those_of_all_logits(make, rules, doubt):
    full, exact = make(), make(count=60, doubt=doubt)
    for name, options in MODES.items():
        before = exact.stats
        assert tokens(exact, **options, **rules) == tokens(full, **options, **rules), name
        certified = exact.stats.certified - before.certified
        fallbacks = exact.stats.fallbacks - before.fallbacks
        assert certified + fallbacks == 40
        if rules is RULES["overruled"]:
            assert fallbacks == 40
        elif doubt == 0.0:
            assert certified > 30, name
    assert exact.stats.fallbacks == exact._runner.full_rows
    assert all(mode.endswith(", processed") for mode in exact.stats.modes)


@pytest.mark.parametrize(
    "options",
    [
        {"typical_p": 0.6},
        {"epsilon_cutoff": 0.01},
        {"eta_cutoff": 0.02, "top_k": 9},
        {"process_scores": lambda context, scores, ids: scores - ids * 0.01},
    ],
    ids=",".join,
)
def test_what_depends_on_the_whole_row_takes_all_logits(make, options):
    given = {"temperature": 1.0, "seed": 3, **options}
    exact = make(count=60)
    assert tokens(exact, **given) == tokens(make(), **given)
    assert exact.stats.fallbacks == 40 and exact.stats.certified == 0


def test_beams_take_all_logits(make):
    asked = {"num_beams": 3, "n": 2, "max_new_tokens": 6, "eos_token_id": (), "logit_bias": {9: 2}}
    exact, full = make(count=60), make()
    found, wanted = (each.generate(["ab"], **asked) for each in (exact, full))
    assert [(each.token_ids, each.score) for each in found] == [
        (each.token_ids, each.score) for each in wanted
    ]
    assert exact._runner.full_rows == 1 + 5 * 3


def test_likelihoods_take_all_logits_and_leave_the_counts(make):
    exact = make(count=60)
    [found] = exact.generate(["ab"], max_new_tokens=5, logprobs=2, eos_token_id=())
    [wanted] = make().generate(["ab"], max_new_tokens=5, logprobs=2, eos_token_id=())
    assert found.token_ids == wanted.token_ids
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert one == other and one.top_logprobs[0].token_id == one.token_id
    assert exact.stats.certified == 5 and exact.stats.fallbacks == 0
    assert exact._runner.full_rows == 5


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        (lambda context: np.ones(5, bool), "a mask over the vocabulary"),
        (lambda context: [], "allows no token"),
        (lambda context: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_callback_that_fails_ends_its_request_alone(make, allowed, message):
    generator = make(count=60)
    broken = generator.submit(["ab"], allowed=allowed, max_new_tokens=20)
    other = generator.submit(["ab"], max_new_tokens=20, eos_token_id=())
    with pytest.raises(RequestError, match=message):
        broken.result()
    assert other.result()[0].token_ids == tokens(make())[0]


def test_counts_go_to_their_mode(make):
    generator = make(count=60)
    tokens(generator)
    tokens(generator, temperature=1.0, top_k=20, seed=1)
    modes = generator.stats.modes
    assert modes.keys() == {"greedy", "top_k"}
    assert modes["greedy"] == {"certified": 40, "fallbacks": 0, "unproved": 0}
    modes["greedy"]["certified"] = 0
    assert generator.stats.modes["greedy"]["certified"] == 40  # a copy was given


def test_without_exact_nothing_is_computed_in_full(make):
    generator = make(count=60, doubt=1e9, options={"exact": False})
    tokens(generator)
    assert generator.stats.unproved == 40 and generator._runner.full_rows == 0


def test_rescored_heads_prove_nothing(make):
    generator = make(count=60, certified=False)
    assert not generator.exact
    assert tokens(generator) == tokens(make())
    assert generator.stats.unproved == 40 and generator.stats.certified == 0


@pytest.mark.parametrize(
    ("arguments", "found"),
    [({}, "all logits"), ({"count": 5, "certified": False}, "candidates without a certificate")],
)
def test_exact_is_refused_without_a_certificate(make, arguments, found):
    with pytest.raises(BundleError, match=f"need a certified head, this one gives {found}"):
        make(options={"exact": True}, **arguments)


def test_candidates_that_are_not_finite_are_refused(make, table):
    broken = table.copy()
    broken[ord("a") - 33, 5] = np.nan
    with pytest.raises(NonFiniteError, match="row 0, step 0"):
        make(broken, count=257 - 1).generate([[ord("a") - 33]])


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_padded_candidates_are_no_tokens(make, table, options):
    padded = np.concatenate([table, np.full((257, 63), 50.0)], axis=1)
    assert tokens(make(padded, count=150), **options) == tokens(make(), **options)


def test_logits_and_scores_come_from_the_full_product(make):
    generator, full = make(count=5), make()
    assert (generator.logits([3, 4]) == full.logits([3, 4])).all()
    assert generator.score("abc")[0].nll.tolist() == full.score("abc")[0].nll.tolist()
