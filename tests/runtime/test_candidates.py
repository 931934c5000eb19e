import numpy as np
import pytest

from headport.errors import NonFiniteError, RequestError
from headport.runtime.candidates import CandidateRow, decide
from headport.runtime.noise import NoiseKey
from headport.runtime.sampler import Sampling, choose

IDS = np.arange(40)


def proved(logits: np.ndarray, count: int) -> CandidateRow:
    order = np.argsort(-logits, kind="stable")[:count]
    return CandidateRow(IDS[order], logits[order])


def row_of(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=len(IDS)) * 3).astype(np.float32)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.8), Sampling(1.0, top_k=5), Sampling(1.2, top_k=5, top_p=0.8)],
)
def test_what_is_decided_is_what_the_full_row_gives(sampling):
    decided = 0
    for step in range(200):
        logits, key = row_of(step), NoiseKey(3, step)
        found = decide(proved(logits, 12), IDS, sampling, key)
        if found is not None:
            decided += 1
            assert found == choose(logits, IDS, sampling, key)
    assert decided > 150


def test_nothing_proved_decides_nothing():
    assert decide(proved(row_of(0), 0), IDS, Sampling(), None) is None


def test_equal_best_logits_go_to_the_lowest_original_id():
    row = CandidateRow(np.array([9, 4, 7]), np.array([2, 2, 1], np.float32))
    assert decide(row, IDS, Sampling(), None) == 4


def test_one_proved_token_cannot_settle_flat_logits():
    # With equal logits the noise of the 39 others decides, and their order is not proved.
    row = CandidateRow(IDS[:1], np.zeros(1, np.float32))
    found = [decide(row, IDS, Sampling(1.0), NoiseKey(1, step)) for step in range(100)]
    assert found.count(None) > 80
    assert all(f in (None, 0) for f in found)


def test_everything_proved_decides_all_of_it():
    for step in range(50):
        logits, key = row_of(step), NoiseKey(4, step)
        found = decide(proved(logits, len(IDS)), IDS, Sampling(1.0), key)
        assert found == choose(logits, IDS, Sampling(1.0), key)


def test_top_k_needs_the_next_one_to_be_lower():
    logits = np.array([3, 2, 1, 1, 0], np.float32)
    ids, sampling, key = np.arange(5), Sampling(1.0, top_k=3), NoiseKey(1, 0)
    two, three, four, five = (CandidateRow(ids[:n], logits[:n]) for n in (2, 3, 4, 5))
    assert decide(two, ids, sampling, key) is None  # the third is not proved
    assert decide(three, ids, sampling, key) is None  # a fourth may tie with it
    assert decide(four, ids, sampling, key) is None  # and does, and a fifth may
    assert decide(five, ids, sampling, key) == choose(logits, ids, sampling, key)


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_p=0.5), Sampling(1.0, min_p=0.1)])
def test_mass_over_all_tokens_is_not_decided(sampling):
    assert decide(proved(row_of(0), 12), IDS, sampling, NoiseKey(1, 0)) is None


def test_a_generator_over_candidates_gives_the_tokens_of_one_over_logits(make):
    full, certified = make(), make(certified=60)
    for options in (
        {},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "top_k": 20, "seed": 5},
    ):
        expected = full.generate(["ab", "c"], max_new_tokens=20, eos_token_id=(), **options)
        found = certified.generate(["ab", "c"], max_new_tokens=20, eos_token_id=(), **options)
        assert [f.token_ids for f in found] == [e.token_ids for e in expected]
    assert certified.stats.certified == certified.stats.new_tokens == 120
    assert full.stats.certified == 0


def test_a_generator_that_cannot_decide_says_so_and_counts_it(make):
    generator = make(certified=0)
    with pytest.raises(
        RequestError, match="row 0, step 0: the head proved 0 of its 257 candidates"
    ):
        generator.generate("a")
    assert generator.stats.fallbacks == 1 and generator.stats.certified == 0


def test_candidates_that_are_not_finite_are_refused(make, table):
    broken = table.copy()
    broken[ord("a") - 33, 5] = np.nan
    with pytest.raises(NonFiniteError, match="row 0, step 0"):
        make(broken, certified=5).generate([[ord("a") - 33]])


def test_padded_candidates_are_no_tokens(make, table):
    padded = np.concatenate([table, np.full((257, 63), 50.0)], axis=1)
    expected = make().generate("a", max_new_tokens=8, eos_token_id=())
    found = make(padded, certified=100).generate("a", max_new_tokens=8, eos_token_id=())
    assert found[0].token_ids == expected[0].token_ids


def test_logits_and_scores_need_all_logits(make):
    with pytest.raises(RequestError, match=r"needs? a head that gives all"):
        make(certified=5).score("abc")
