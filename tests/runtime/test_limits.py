import numpy as np
import pytest

from headport.errors import RequestError
from headport.runtime.limits import check
from headport.runtime.sampling.noise import MAX_SEED

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", [1, 10**6, np.int32(3)]),
        ("temperature", [0, 0.0, 1e-5, 2, np.float32(0.5)]),
        ("top_k", [0, 1, 10**9]),
        ("top_p", [0, 1e-8, 1, 1.0]),
        ("min_p", [0, 0.05, 1.0]),
        ("typical_p", [1e-9, 0.5, 1]),
        ("epsilon_cutoff", [0, 0.5, 0.999]),
        ("eta_cutoff", [0, 3e-4]),
        ("repetition_penalty", [0.5, 1, 1.3]),
        ("presence_penalty", [-2, 0, 2.0]),
        ("frequency_penalty", [-0.5, np.float32(1.5)]),
        ("no_repeat_ngram_size", [0, 3]),
        ("min_new_tokens", [0, 5]),
        ("logit_bias", [{}, {5: -100}, {(1, 2): 1.5}, [([1], 2.0)], [[[1, 2], 0.5]]]),
        ("bad_words", [[], [[1], (2, 3)]]),
        ("suppress_tokens", [[], [1, 2], np.array([3])]),
        ("allowed", [[1], (2, 3), print]),
        ("n", [1, 4]),
        ("num_beams", [1, 8]),
        ("length_penalty", [-1, 0, 2.0]),
        ("early_stopping", [True, False, "never"]),
        ("logprobs", [0, 20]),
        ("rerank", [sorted]),
        ("seed", [0, MAX_SEED, [1, 2], (3,)]),
        ("stop", ["a", ["a", "b"], ()]),
        ("eos_token_id", [0, [3, 5], ()]),
    ],
)
def test_accepted(name, values):
    for value in values:
        check({name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", [0, -1, 1.0, "1", True]),
        ("temperature", [-0.1, NAN, float("inf"), "hot", True, 10**400]),
        ("top_k", [-1, 2.0, NAN, True]),
        ("top_p", [-0.1, 1.1, NAN, float("-inf")]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("typical_p", [0, -0.1, 1.1, NAN]),
        ("epsilon_cutoff", [-0.1, 1, NAN]),
        ("eta_cutoff", [1.0, 2, NAN]),
        ("repetition_penalty", [0, -1, NAN, float("inf"), True]),
        ("presence_penalty", [NAN, float("inf"), "1"]),
        ("no_repeat_ngram_size", [-1, 1.5, True]),
        ("min_new_tokens", [-1, 2.0]),
        (
            "logit_bias",
            [
                {-1: 1.0},
                {1: NAN},
                {1: float("inf")},
                {1: 10**400},
                {"a": 1},
                {(): 1.0},
                [1],
                5,
                [[1]],
            ],
        ),
        ("bad_words", [[[]], [1], "word", [["a"]], [[-1]]]),
        ("suppress_tokens", [5, [-1], ["a"], "x"]),
        ("allowed", [[], [-1], 3, "a"]),
        ("process_scores", [3]),
        ("n", [0, -1, 1.5, 10_001, 10**9]),
        ("num_beams", [0, True, 1001, 10**6]),
        ("length_penalty", [NAN, "1", 1e6, 1000, -51]),
        ("early_stopping", ["always", 1, 0.5]),
        ("logprobs", [-1, 1001, True]),
        ("rerank", ["best"]),
        ("seed", [-1, MAX_SEED + 1, 1.5, [1, -2], "7"]),
        ("stop", ["", [""], [1], 3]),
        ("eos_token_id", [-1, [3, -5], 1.5, "2"]),
    ],
)
def test_refused_with_range_and_value(name, values):
    for value in values:
        with pytest.raises(RequestError, match=f"{name} must be .* was given"):
            check({name: value})


def test_all_faults_at_once():
    with pytest.raises(RequestError, match=r"temperature must be .*; top_p must be"):
        check({"temperature": -1, "top_k": 3, "top_p": 2})


def test_long_values_are_cut_in_the_message():
    with pytest.raises(RequestError, match=r"suppress_tokens must be .*… was given") as caught:
        check({"suppress_tokens": [*range(10_000), -1]})
    assert len(str(caught.value)) < 400
