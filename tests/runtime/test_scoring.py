import msgspec
import numpy as np
import pytest

from headport.errors import BundleError, PromptError, RequestError
from headport.manifest import FileEntry, Vocabulary


def expected_logits(table: np.ndarray, ids: list[int]) -> np.ndarray:
    return np.stack([table[i] * (1 + t / 100) for t, i in enumerate(ids)])


def test_logits_follow_each_token(make, table):
    found = make().logits([5, 6, 5])
    assert found.dtype == np.float32 and found.shape == (3, 257)
    np.testing.assert_allclose(found, expected_logits(table, [5, 6, 5]), rtol=1e-5)


def test_padded_columns_are_not_part_of_it(make, table):
    padded = np.concatenate([table, np.full((257, 7), 99.0)], axis=1)
    assert make(padded).logits([5]).shape == (1, 257)
    assert make(padded).score([[5, 6]])[0].nll[1] == make().score([[5, 6]])[0].nll[1]


def test_each_token_is_scored_once_from_those_before_it(make, table):
    [score] = make().score([[5, 6, 9]])
    assert score.token_ids == [5, 6, 9]
    assert score.mask.tolist() == [False, True, True]
    assert score.nll.dtype == np.float64 and score.nll[0] == 0.0
    rows = expected_logits(table, [5, 6])
    for t, (row, target) in enumerate(zip(rows, [6, 9], strict=True)):
        assert score.nll[t + 1] == pytest.approx(np.log(np.exp(row).sum()) - row[target], rel=1e-5)


def test_texts_and_ids_score_alike_whatever_they_are_scored_with(make):
    generator = make()
    alone = [generator.score(text)[0].nll for text in ("abc", "a", "ab c d")]
    together = generator.score(["abc", [64], "ab c d"])
    for one, score in zip(alone, together, strict=True):
        assert (one == score.nll).all()
    assert together[1].nll.tolist() == [0.0] and not together[1].mask.any()


def test_large_logits_do_not_overflow(make, table):
    [score] = make(table * 1000).score("abc")
    assert np.isfinite(score.nll).all()


def test_a_long_text_is_scored_in_pieces_without_a_seam(make, make_bundle, monkeypatch):
    whole = make().score([[1, 2, 3, 4, 5, 6, 7]])[0].nll
    logits = make().logits([1, 2, 3, 4, 5])
    monkeypatch.setattr("headport.runtime.scoring._ROWS", 2)
    assert (make().score([[1, 2, 3, 4, 5, 6, 7]])[0].nll == whole).all()
    assert (make().logits([1, 2, 3, 4, 5]) == logits).all()


@pytest.fixture
def pruned(make, bundle_folder, tmp_path, table):
    (tmp_path / "tokenizer.json").write_bytes((bundle_folder / "tokenizer.json").read_bytes())
    kept = np.array([65, 66, 70, 256], np.int32)
    np.save(tmp_path / "vocab_map.npy", kept)
    return make(
        table[:, kept],
        folder=tmp_path,
        vocabulary=Vocabulary(size=257, padded_size=257, kept_size=4, map="vocab_map.npy"),
        files={"vocab_map.npy": FileEntry(sha256="", bytes=0)},
    )


def test_a_pruned_bundle_speaks_original_ids(pruned, table):
    logits = pruned.logits([5])[0]
    assert np.flatnonzero(np.isfinite(logits)).tolist() == [65, 66, 70, 256]
    np.testing.assert_allclose(logits[[65, 66, 70, 256]], table[5, [65, 66, 70, 256]], rtol=1e-6)
    score = pruned.score([[5, 66, 67]])[0]
    row = table[5, [65, 66, 70, 256]]
    assert score.nll[1] == pytest.approx(np.log(np.exp(row).sum()) - table[5, 66], rel=1e-5)
    assert np.isinf(score.nll[2])  # 67 was pruned: no chance at all


def test_a_pruned_bundle_draws_what_the_full_one_draws(pruned, make):
    # Noise belongs to the original id, so the pruned bundle follows the full one wherever the
    # full one's token was kept.
    same = 0
    for seed in range(300):
        full = make().generate([[5]], max_new_tokens=1, temperature=2.0, seed=seed)[0].token_ids
        cut = pruned.generate([[5]], max_new_tokens=1, temperature=2.0, seed=seed)[0].token_ids
        assert cut[0] in (65, 66, 70, 256)
        if full[0] in (65, 66, 70, 256):
            same += 1
            assert cut == full
    assert same >= 3


def test_what_does_not_count_is_left_out_and_still_read(make):
    generator = make()
    ids = [5, 6, 9, 6, 7]
    [whole] = generator.score([ids])
    for masks, kept in (
        ({"prompt_tokens": 3}, [3, 4]),
        ({"prompt_tokens": [3]}, [3, 4]),
        ({"ignore_ids": (6, 256)}, [2, 4]),
        ({"prompt_tokens": 2, "ignore_ids": [7]}, [2, 3]),
        ({"prompt_tokens": 9}, []),
    ):
        [score] = generator.score([ids], **masks)
        assert np.flatnonzero(score.mask).tolist() == kept
        assert (score.nll[kept] == whole.nll[kept]).all() and score.nll.sum() == sum(
            whole.nll[kept]
        )
        assert score.tokens == len(kept)
        assert np.isnan(score.mean) if not kept else score.mean == whole.nll[kept].mean()


@pytest.mark.parametrize(
    ("ids", "mask"),
    [([0, 0, 0, 5, 6, 9], [0, 0, 0, 1, 1, 1]), ([5, 6, 9, 256, 256], [1, 1, 1, 0, 0])],
)
def test_padding_on_either_side_changes_nothing(make, ids, mask):
    [alone] = make().score([[5, 6, 9]], prompt_tokens=2)
    [padded] = make().score([ids], prompt_tokens=2, attention_masks=[mask])
    valid = np.array(mask, bool)
    assert padded.token_ids == ids and not padded.mask[~valid].any()
    assert (padded.nll[valid] == alone.nll).all() and (padded.nll[~valid] == 0).all()
    assert (padded.mask[valid] == alone.mask).all()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1]], "mask 0 has 2 values for 3 ids"),
        ([[1, 2, 1]], "mask 0 holds more than 0 and 1"),
        ([[0, 0, 0]], "mask 0 leaves no token"),
        ([[1, 0, 1]], "mask 0 has padding between tokens"),
        ([[1, 1, 1]] * 2, "one mask per text was expected: 1, 2 given"),
    ],
)
def test_masks_that_do_not_fit(make, mask, message):
    with pytest.raises(PromptError, match=message):
        make().score([[5, 6, 9]], attention_masks=mask)


@pytest.mark.parametrize("starts", [-1, [1, 2], [1.5], "a", None])
def test_prompt_tokens_that_are_none(make, starts):
    with pytest.raises(RequestError, match="prompt_tokens: one number from 0 up"):
        make().score([[5, 6, 9]], prompt_tokens=starts)


def test_hidden_states_and_other_heads(make, make_bundle, monkeypatch):
    lm = make_bundle().manifest.heads["lm"]
    value = msgspec.structs.replace(lm, graph="head.value", vocab_size=1)
    heads = {"lm": lm, "value": value}
    generator = make(heads=heads, options={"more_heads": ["value"]})
    hidden = generator.hidden_states([5, 6])
    assert hidden.dtype == np.float32 and hidden.tolist() == [[5, 0], [6, 1]]
    logits = type(generator._runner).full_logits

    def both(self, states, name="lm"):
        return states[:, :1] * 2 if name == "value" else logits(self, states)

    monkeypatch.setattr(type(generator._runner), "full_logits", both)
    assert generator.outputs([5, 6], "value").tolist() == [[10], [12]]
    assert (generator.outputs([5, 6], "lm") == generator.logits([5, 6])).all()
    assert generator.heads == ("lm", "value")
    with pytest.raises(BundleError, match=r"no head 'reward' in it \(heads: lm, value\)"):
        make(heads=heads, options={"more_heads": ["reward"]})
    with pytest.raises(BundleError, match=r"no head 'reward' in it"):
        make(heads=heads, options={"head": "reward"})


def test_nothing_to_score(make):
    with pytest.raises(PromptError, match="prompt 0 is empty"):
        make().score([[]])
    with pytest.raises(PromptError, match="65 tokens were given, but the context holds 64"):
        make().logits([1] * 65)
