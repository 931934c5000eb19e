import pytest

from headport.errors import RequestError
from headport.runtime.generation_config import Defaults
from headport.runtime.parameters import check_ids, resolve
from headport.runtime.sampling.settings import Beams, FixedIds, Sampling

SAMPLED = Defaults(Sampling(0.6, 20, 0.9))
GREEDY = Defaults(Sampling(top_p=0.9))  # as do_sample: false beside a top_p


def test_the_bundle_decides_where_the_call_is_silent():
    assert resolve({}, SAMPLED, 1).sampling == Sampling(0.6, 20, 0.9)
    assert resolve({}, GREEDY, 1).sampling.temperature == 0.0


def test_the_call_decides_where_it_speaks():
    found = resolve({"temperature": 1.0, "top_k": 0}, SAMPLED, 1).sampling
    assert found == Sampling(1.0, 0, 0.9)


def test_a_temperature_switches_sampling_on_and_zero_off():
    assert resolve({"temperature": 0.5}, GREEDY, 1).sampling == Sampling(0.5, 0, 0.9)
    assert resolve({"temperature": 0, "top_p": 0.5}, SAMPLED, 1).sampling.temperature == 0.0


def test_none_counts_as_left_out():
    assert resolve({"temperature": None, "seed": None}, SAMPLED, 1).sampling.temperature == 0.6


@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.1}])
def test_a_filter_without_effect_is_refused(options):
    with pytest.raises(RequestError, match=f"{next(iter(options))} would have no effect"):
        resolve(options, GREEDY, 1)


@pytest.mark.parametrize("options", [{"top_p": 1.0}, {"top_k": 0}, {"seed": 3}])
def test_neutral_options_never_matter(options):
    assert resolve(options, GREEDY, 1).sampling.temperature == 0.0


def test_unknown_options_are_named():
    with pytest.raises(RequestError, match="no option topk; the options are max_new_tokens, min_"):
        resolve({"topk": 3}, GREEDY, 1)


def test_end_tokens_and_stop_texts_replace_the_bundles():
    defaults = Defaults(eos_token_ids=(2,), stop=("END",))
    assert resolve({}, defaults, 1).eos_token_ids == (2,)
    assert resolve({"eos_token_id": ()}, defaults, 1).eos_token_ids == ()
    assert resolve({"eos_token_id": 5, "stop": "x"}, defaults, 1).stop == ("x",)
    assert resolve({"eos_token_id": [5, 6], "stop": ["x", "y"]}, defaults, 1).stop == ("x", "y")


def test_one_seed_for_all_or_one_for_each():
    assert resolve({}, GREEDY, 2).seeds is None
    assert resolve({"seed": 7}, GREEDY, 2).seeds == (7, 7)
    assert resolve({"seed": [7, 8]}, GREEDY, 2).seeds == (7, 8)
    with pytest.raises(RequestError, match="each of the 2 prompts, was expected; 3 were given"):
        resolve({"seed": [7, 8, 9]}, GREEDY, 2)


def test_every_option_reaches_its_place():
    found = resolve(
        {
            "typical_p": 0.9,
            "epsilon_cutoff": 0.01,
            "eta_cutoff": 0.02,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "no_repeat_ngram_size": 3,
            "min_new_tokens": 2,
            "logit_bias": {5: 1, (3, 4): -2.5},
            "bad_words": [[1, 2], (3,)],
            "suppress_tokens": [7],
            "begin_suppress_tokens": (8,),
            "allowed": [1, 2],
        },
        SAMPLED,
        1,
    ).sampling
    assert found == Sampling(
        0.6, 20, 0.9, 0.0, 0.9, 0.01, 0.02,
        logit_bias=(((5,), 1.0), ((3, 4), -2.5)),
        repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=-0.5,
        no_repeat_ngram_size=3, bad_words=((1, 2), (3,)), min_new_tokens=2,
        allowed=FixedIds((1, 2)), suppress_tokens=(7,), begin_suppress_tokens=(8,),
    )  # fmt: skip


def test_beams_and_samples():
    found = resolve({"num_beams": 4, "n": 2, "length_penalty": 0.5}, GREEDY, 1)
    assert found.beams == Beams(4, 0.5, False) and found.n == 2
    bundle = Defaults(beams=Beams(4, 0.5, "never"), n=4)
    assert resolve({}, bundle, 1).beams == Beams(4, 0.5, "never")
    assert resolve({"num_beams": 1, "n": 1}, bundle, 1).beams.num_beams == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "n=2 greedy replies would all be equal; give a temperature above 0"),
        ({"num_beams": 2, "n": 3}, "n must be from 1 to num_beams=2, 3 was given"),
        ({"num_beams": 2, "temperature": 0.5}, "beam search is greedy: num_beams=2"),
        ({"num_beams": 2, "logprobs": 1}, "logprobs are not given for beams"),
        ({"length_penalty": 2.0}, "length_penalty would have no effect without num_beams"),
        ({"early_stopping": True}, "early_stopping would have no effect"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens=9 is above max_new_tokens=3"),
    ],
    ids=str,
)
def test_what_has_no_meaning_together_is_refused(options, message):
    with pytest.raises(RequestError, match=message):
        resolve(options, GREEDY, 1)


def test_unknown_ids_are_named_by_option():
    sampling = resolve(
        {"logit_bias": {(5, 300): 1.0}, "bad_words": [[1], [257]], "allowed": [3, 999]}, GREEDY, 1
    ).sampling
    check_ids(sampling, (2,), 1000, RequestError)
    message = r"from 0 to 256 .* found eos_token_id: 400; logit_bias: 300; bad_words: 257; allow"
    with pytest.raises(RequestError, match=message):
        check_ids(sampling, (2, 400), 257, RequestError)


def test_many_unknown_ids_are_counted():
    sampling = Sampling(suppress_tokens=tuple(range(300)))
    with pytest.raises(RequestError, match=r"suppress_tokens: 257, .*, 266 and 33 more$"):
        check_ids(sampling, (), 257, RequestError)
