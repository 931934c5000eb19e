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
        ("temperature", [-0.1, NAN, float("inf"), "hot", True]),
        ("top_k", [-1, 2.0, NAN, True]),
        ("top_p", [-0.1, 1.1, NAN, float("-inf")]),
        ("min_p", [-0.1, 1.1, NAN]),
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
