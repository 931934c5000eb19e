import pytest

from headport.errors import RequestError
from headport.runtime.generation_config import Defaults
from headport.runtime.parameters import resolve
from headport.runtime.sampling.settings import Sampling

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
