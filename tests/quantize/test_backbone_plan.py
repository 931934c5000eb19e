"""Which matrix is stored how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headport.errors import QuantizeError, UsageError
from headport.manifest import StoredMatrix
from headport.quantize.backbone_plan import (
    backbone_request,
    parse_override,
    plan_matrices,
    refuse_head_options,
)
from headport.quantize.options import Options

NAMES = ("m.layers.0.q.weight", "m.layers.0.down.weight", "m.layers.1.down.weight")


def _options(**changes: Any) -> Options:
    return Options(bundle=Path("b"), output=Path("o"), **changes)


def _plan(*overrides: str, **changes: Any) -> dict[str, StoredMatrix]:
    request = backbone_request(_options(override=overrides, **changes))
    return plan_matrices(NAMES, request, left=("m.experts",))


def _stored(text: str) -> StoredMatrix:
    name, _, block = text.partition(":")
    return StoredMatrix(format=name, block=int(block) if block else None)  # type: ignore[arg-type]


def test_defaults_of_each_format() -> None:
    assert set(_plan(backbone="int8").values()) == {_stored("int8:64")}
    assert set(_plan(backbone="int4").values()) == {_stored("int4:32")}
    assert set(_plan(backbone="fp16").values()) == {_stored("fp16")}
    assert set(_plan(backbone="int4", backbone_block=128).values()) == {_stored("int4:128")}
    assert not backbone_request(_options())
    assert not _plan()


def test_the_last_override_that_fits_decides() -> None:
    found = _plan("*.down=int8:16", "m.layers.0.*=none", "*.q.weight=fp16", backbone="int4")
    assert found == {
        "m.layers.0.q.weight": _stored("fp16"),
        "m.layers.1.down.weight": _stored("int8:16"),
    }
    assert _plan("*.q=int8") == {"m.layers.0.q.weight": _stored("int8:64")}
    assert _plan("*.q=int8", "m.*.q=int4", backbone_block=256)[NAMES[0]] == _stored("int4:256")


def test_unmatched_patterns_are_refused_all_at_once() -> None:
    with pytest.raises(QuantizeError, match=r"fits '\*\.up', 'm\.layers\.7\.\*'; its matrices are"):
        _plan("*.up=int8", "m.layers.7.*=none", "*.q=fp16")
    with pytest.raises(QuantizeError, match=r"m\.experts \(no product reads it\)"):
        _plan("m.experts=int8")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"override": ("*.q",)}, "PATTERN=FORMAT"),
        ({"override": ("=int8",)}, "PATTERN=FORMAT"),
        ({"override": ("*=int8:x",)}, "PATTERN=FORMAT"),
        ({"override": ("*=int3",)}, "'int3' is not one of none, fp16, int8, int4"),
        ({"override": ("*=int8:48",)}, "block 48 is not one of 16, 32, 64, 128, 256"),
        ({"override": ("*=fp16:32",)}, "fp16 has no blocks"),
        ({"backbone": "int5"}, "'int5' is not one of"),
        ({"backbone": "int8", "backbone_block": 8}, "block 8 is not one of"),
        ({"backbone_block": 32}, "no meaning without --backbone int8 or int4"),
        ({"backbone": "fp16", "backbone_block": 32}, "no meaning without"),
        ({"embedding": "int4"}, "--embedding int4: use one of none, fp16, int8"),
        ({"embedding": "fp16", "embedding_block": 32}, "no meaning without --embedding int8"),
        ({"backbone": "int8", "backbone_activations": "half"}, "use residual, rounded, exact"),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        backbone_request(_options(**changes))


def test_the_embedding_takes_the_heads_block() -> None:
    assert backbone_request(_options(head="int8", block=32, embedding="int8")).embedding == _stored(
        "int8:32"
    )
    assert backbone_request(_options(embedding="int8")).embedding == _stored("int8:64")


def test_options_of_a_head_need_one() -> None:
    refuse_head_options(_options(backbone="int8"))
    with pytest.raises(UsageError, match="--block, --certify has no meaning without --head"):
        refuse_head_options(_options(backbone="int8", block=32, certify=True))


def test_parse_override_splits_at_the_last_equals_sign() -> None:
    assert parse_override("a=b=none", None).pattern == "a=b"
