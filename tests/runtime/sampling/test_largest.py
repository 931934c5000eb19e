import numpy as np
import pytest

from headport.runtime.sampling.largest import largest


@pytest.mark.parametrize("size", [1, 2, 33, 257])
def test_it_is_the_head_of_a_stable_sort(size):
    rng = np.random.default_rng(size)
    for values in (rng.normal(size=size), rng.integers(0, 5, size).astype(np.float32)):
        for count in (0, 1, 2, size // 2, size, size + 3):
            expected = np.argsort(-values, kind="stable")[:count]
            assert largest(values, count).tolist() == expected.tolist()


def test_what_is_banned_is_never_among_them():
    values = np.array([-np.inf, 1.0, -np.inf, 2.0])
    assert largest(values, 3).tolist() == [3, 1]
    assert largest(np.full(3, -np.inf), 2).tolist() == []
