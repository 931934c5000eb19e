"""Names of heads and their parts."""

from __future__ import annotations

import msgspec
import pytest

from headport.errors import BundleError
from headport.head_parts import all_parts, find_head, with_heads
from headport.manifest import (
    AdaptiveHead,
    Head,
    Task,
    TasksHead,
    TreeHead,
    ValueHead,
    decode_manifest,
    encode_manifest,
)
from tests.bundles import manifest


def _head(graph: str) -> Head:
    return msgspec.structs.replace(manifest().heads["lm"], graph=graph)


def _manifest():
    tasks = {name: Task(head=_head(name), labels=("x",)) for name in ("a", "b")}
    return manifest(
        task_heads={
            "v": ValueHead(meaning="", head=_head("v"), pooling="last", pad_id=3),
            "t": TasksHead(meaning="", tasks=tasks, pooling="none", pad_id=None),
            "s": AdaptiveHead(
                meaning="", shortlist=_head("s0"), tails=(_head("s1"), _head("s2")), cutoffs=(1, 2)
            ),
            "c": TreeHead(
                meaning="", classes=_head("c0"), members=_head("c1"), starts=(0, 1), order=None
            ),
        }
    )


GRAPHS = {
    **{"lm": "head.lm", "v": "v", "t.a": "a", "t.b": "b"},
    **{"s.shortlist": "s0", "s.tail1": "s1", "s.tail2": "s2"},
    **{"c.classes": "c0", "c.members": "c1"},
}


def test_every_part_has_a_name():
    assert {name: head.graph for name, head in all_parts(_manifest()).items()} == GRAPHS
    assert find_head(_manifest(), "t.b").graph == "b"
    with pytest.raises(BundleError, match=r"no head 't\.c' in the bundle \(heads: lm, v"):
        find_head(_manifest(), "t.c")


@pytest.mark.parametrize("name", GRAPHS)
def test_one_part_is_replaced(name):
    found = with_heads(_manifest(), {name: _head("new")})
    graphs = {each: head.graph for each, head in all_parts(found).items()}
    assert graphs == GRAPHS | {name: "new"}


def test_they_come_back_from_json():
    made = _manifest()
    assert decode_manifest(encode_manifest(made), "x") == made


def test_a_manifest_without_them_does_not_mention_them():
    # Older readers refuse fields that they do not know.
    assert b"task_heads" not in encode_manifest(manifest())
    assert b"transform" not in encode_manifest(manifest())
