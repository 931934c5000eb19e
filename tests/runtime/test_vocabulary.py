import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.manifest import FileEntry, Vocabulary
from headport.runtime.vocabulary import IdMap


def test_without_pruning_ids_stay_and_padding_goes():
    ids = IdMap(3)
    assert ids.ids.tolist() == [0, 1, 2]
    assert ids.rows(np.array([[1, 2, 3, 99]], np.float32)).tolist() == [[1, 2, 3]]


def test_pruned_columns_are_spread_over_the_whole_vocabulary():
    ids = IdMap(10, np.array([2, 5, 7]))
    rows = ids.rows(np.array([[20, 50, 70, 99]], np.float32))
    assert rows.tolist() == [[20, 50, 70]]
    spread = ids.spread(rows)[0]
    assert spread[[2, 5, 7]].tolist() == [20, 50, 70]
    assert np.isneginf(np.delete(spread, [2, 5, 7])).all()


def test_a_head_narrower_than_its_vocabulary_is_refused():
    with pytest.raises(BundleError, match="3 logits per row expected, the head gives 2"):
        IdMap(3).rows(np.zeros((1, 2), np.float32))


def pruned(make_bundle, folder, values) -> Bundle:
    np.save(folder / "vocab_map.npy", values)
    bundle = make_bundle(folder)
    manifest = msgspec.structs.replace(
        bundle.manifest,
        vocabulary=Vocabulary(size=257, padded_size=257, kept_size=3, map="vocab_map.npy"),
        files={"vocab_map.npy": FileEntry(sha256="", bytes=0)},
    )
    return Bundle(folder, manifest)


def test_the_map_is_read_from_the_bundle(make_bundle, tmp_path):
    ids = IdMap.from_bundle(pruned(make_bundle, tmp_path, np.array([3, 9, 200], np.int32)))
    assert ids.size == 257 and ids.ids.tolist() == [3, 9, 200]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([3, 200, 9], "ascending ids expected, 200 and 9 found at 1"),
        ([3, 3, 9], "ascending ids expected, 3 and 3 found at 0"),
        ([3, 9, 257], r"ids from 0 to 256 expected, \[257\] found"),
        ([-1, 3, 9], r"ids from 0 to 256 expected, \[-1\] found"),
    ],
)
def test_a_map_that_no_stage_writes_is_refused(make_bundle, tmp_path, values, message):
    with pytest.raises(BundleError, match=message):
        IdMap.from_bundle(pruned(make_bundle, tmp_path, np.array(values, np.int32)))


@pytest.mark.parametrize(
    "values", [np.array([3, 9], np.int32), np.array([3, 9, 200]), np.array([None, 1, 2])]
)
def test_a_foreign_map_is_refused(make_bundle, tmp_path, values):
    with pytest.raises(BundleError, match=r"vocab_map.npy"):
        IdMap.from_bundle(pruned(make_bundle, tmp_path, values))
