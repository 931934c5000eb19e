import pytest

from headport.errors import BundleError
from headport.runtime.generation_config import IGNORED, NEUTRAL, USED, Defaults, read_defaults
from headport.runtime.sampling.settings import Beams, Sampling


def test_nothing_said_is_greedy():
    assert read_defaults({}) == Defaults()
    assert Defaults().sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"temperature": 0.6}, 0.0),  # as in transformers, where do_sample is false unless said
        ({"do_sample": True, "temperature": 0.6}, 0.6),
        ({"do_sample": True}, 1.0),
    ],
)
def test_do_sample_switches_sampling(fields, temperature):
    assert read_defaults(fields).sampling.temperature == temperature


def test_everything_that_is_used():
    found = read_defaults(
        {
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
            "min_p": 0.05,
            "max_new_tokens": 9,
            "max_length": 30,
            "eos_token_id": [3, 5],
            "stop_strings": "END",
        }
    )
    assert found == Defaults(Sampling(0.7, 20, 0.8, 0.05), 9, 30, (3, 5), ("END",))


def test_processors_and_beams_are_used():
    found = read_defaults(
        {
            "repetition_penalty": 1.05,
            "presence_penalty": 0.5,
            "suppress_tokens": [7],
            "begin_suppress_tokens": [8, 9],
            "bad_words_ids": [[30], [4, 5]],
            "sequence_bias": [[[3], 1.5], [[4, 5], -2.0]],
            "no_repeat_ngram_size": 3,
            "min_length": 4,
            "min_new_tokens": 5,
            "num_beams": 4,
            "num_return_sequences": 2,
            "length_penalty": 0.5,
            "early_stopping": "never",
        }
    )
    assert found.sampling == Sampling(
        repetition_penalty=1.05,
        presence_penalty=0.5,
        suppress_tokens=(7,),
        begin_suppress_tokens=(8, 9),
        bad_words=((30,), (4, 5)),
        logit_bias=(((3,), 1.5), ((4, 5), -2.0)),
        no_repeat_ngram_size=3,
        min_length=4,
        min_new_tokens=5,
    )
    assert found.beams == Beams(4, 0.5, "never") and found.n == 2


@pytest.mark.parametrize("value", [1, 0, "true", [True]])
def test_a_do_sample_that_is_no_truth_value_is_refused(value):
    with pytest.raises(BundleError, match="do_sample must be true or false, "):
        read_defaults({"do_sample": value})


def test_forced_tokens_are_used():
    found = read_defaults({"forced_bos_token_id": 2, "forced_eos_token_id": [3, 4]}).sampling
    assert found.forced_bos == 2 and found.forced_eos == (3, 4)
    assert read_defaults({"forced_eos_token_id": 3}).sampling.forced_eos == (3,)
    with pytest.raises(BundleError, match="forced_bos must be a token id"):
        read_defaults({"forced_bos_token_id": -1})


def test_sampled_beams_are_refused():
    with pytest.raises(BundleError, match=r"do_sample=True, num_beams=2"):
        read_defaults({"do_sample": True, "num_beams": 2})


@pytest.mark.parametrize("field", ["bad_words_ids", "suppress_tokens", "sequence_bias"])
def test_empty_lists_mean_nothing(field):
    assert read_defaults({field: []}) == Defaults()


def test_one_end_token_or_several():
    assert read_defaults({"eos_token_id": 2}).eos_token_ids == (2,)
    assert read_defaults({"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("exponential_decay_length_penalty", [5, 1.1]),
        ("guidance_scale", 1.5),
        ("diversity_penalty", 0.5),
        ("max_time", 3.0),
        ("encoder_no_repeat_ngram_size", 2),  # generate() hands the prompt over as encoder input
        ("a_field_of_the_future", 1),
    ],
)
def test_what_would_change_tokens_is_refused_by_name(name, value):
    with pytest.raises(BundleError, match=f"asks for {name}="):
        read_defaults({name: value, "eos_token_id": 2})
    assert read_defaults({name: value, "eos_token_id": 2}, ignore=[name]).eos_token_ids == (2,)


def test_all_refused_fields_are_named_at_once():
    with pytest.raises(
        BundleError, match=r"dola_layers='low', top_h=0.5.*ignore=\('dola_layers', 'top_h'\)"
    ):
        read_defaults({"top_h": 0.5, "dola_layers": "low"})


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_neutral_values_are_accepted(name):
    for value in (None, *NEUTRAL[name]):
        assert read_defaults({name: value}) == Defaults()


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_harmless_fields_are_ignored(name):
    assert read_defaults({name: "anything"}) == Defaults()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("top_p", 1.5, "top_p must be a number from 0 to 1"),
        ("eos_token_id", -1, "eos_token_id must be token ids"),
        ("stop_strings", [""], "stop must be texts that are not empty"),
        ("max_new_tokens", 0, "max_new_tokens must be a whole number from 1"),
    ],
)
def test_defaults_out_of_range_are_the_bundles_fault(field, value, message):
    with pytest.raises(BundleError, match=f"generation_config is wrong: {message}"):
        read_defaults({field: value})


def test_every_field_of_transformers_is_in_exactly_one_table():
    transformers = pytest.importorskip("transformers")
    assert not USED & IGNORED and not USED & set(NEUTRAL) and not IGNORED & set(NEUTRAL)
    known = set(vars(transformers.GenerationConfig())) - {"_original_object_hash"}
    assert known <= USED | IGNORED | set(NEUTRAL)


def test_neutral_values_are_the_defaults_of_transformers():
    transformers = pytest.importorskip("transformers")
    preset = transformers.GenerationConfig._get_default_generation_params()
    for name, value in preset.items():
        if name in NEUTRAL and value is not None:
            assert value in NEUTRAL[name]
