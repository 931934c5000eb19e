"""config.pbtxt: names, types and the text format."""

from __future__ import annotations

import pytest

from headport.errors import UsageError
from headport.manifest import Port
from headport.runtime.triton.model_config import (
    GraphServing,
    Instances,
    Word,
    check_name,
    encode,
    graph_tensors,
    is_batched,
    parameters,
    tensor,
)

IDS = Port(name="input_ids", dtype="int64", shape=("batch", "sequence"))
LENGTH = Port(name="total", dtype="int32", shape=())
LOGITS = Port(name="logits", dtype="float", shape=("batch", "sequence", 31))


def test_text() -> None:
    message = {
        "name": 'a "b"\\c\nd é',
        "max_batch_size": 0,
        "kind": Word("KIND_CPU"),
        "dims": [-1, 3],
        "none": [],
        "group": [{"count": 2, "gpus": [0]}, {"on": True}],
        "policy": {"decoupled": False},
    }
    assert encode(message) == (
        "# Written by `headport triton`.\n"
        'name: "a \\"b\\"\\\\c\\nd é"\n'
        "max_batch_size: 0\n"
        "kind: KIND_CPU\n"
        "dims: [ -1, 3 ]\n"
        "none: []\n"
        "group {\n  count: 2\n  gpus: [ 0 ]\n}\n"
        "group {\n  on: true\n}\n"
        "policy {\n  decoupled: false\n}\n"
    )


def test_parameters_are_entries_of_a_map() -> None:
    assert parameters({"b": 0.5, "a": 1}) == [
        {"key": "a", "value": {"string_value": "1"}},
        {"key": "b", "value": {"string_value": "0.5"}},
    ]


def test_ports_without_their_batch() -> None:
    assert graph_tensors([IDS, LOGITS], batched=True) == [
        tensor("input_ids", "INT64", (-1,)),
        tensor("logits", "FP32", (-1, 31)),
    ]
    assert graph_tensors([IDS], batched=False) == [tensor("input_ids", "INT64", (-1, -1))]


def test_types_that_triton_does_not_know_are_named() -> None:
    odd = Port(name="scale", dtype="float8e4m3fn", shape=("batch",))
    with pytest.raises(UsageError, match=r"found scale \(float8e4m3fn\); use --backend python"):
        graph_tensors([IDS, odd], batched=True)


def test_a_number_is_declared_as_one_whose_shape_is_dropped() -> None:
    [number] = graph_tensors([LENGTH], batched=False)
    assert number["dims"] == [1] and number["reshape"] == {"shape": []}
    per_row = Port(name="logsumexp", dtype="float16", shape=("rows",))
    [of_row] = graph_tensors([per_row], batched=True)
    assert (str(of_row["data_type"]), of_row["dims"]) == ("TYPE_FP16", [1])


def test_what_can_be_joined() -> None:
    assert is_batched([IDS, LOGITS], "batch")
    assert not is_batched([IDS, LENGTH], "batch")
    assert not is_batched([IDS], "rows")


def test_graphs_that_cannot_be_joined_take_whole_tensors() -> None:
    serving = GraphServing(Instances(2), max_batch_size=8, queue_delay_us=50)
    joined = serving.message("m", [IDS], [LOGITS], "batch")
    assert joined["max_batch_size"] == 8
    assert joined["dynamic_batching"] == {"max_queue_delay_microseconds": 50}
    alone = serving.message("m", [IDS, LENGTH], [LOGITS], "batch")
    assert alone["max_batch_size"] == 0 and "dynamic_batching" not in alone
    assert alone["output"][0]["dims"] == [-1, -1, 31]


def test_instances() -> None:
    assert Instances(3).message() == {"count": 3, "kind": "KIND_CPU"}
    on_gpus = Instances(1, (0, 1), profiles=2).message()
    assert on_gpus == {"count": 1, "kind": "KIND_GPU", "gpus": [0, 1], "profile": ["0", "1"]}
    assert "profile" not in Instances(1, (0,), profiles=1).message()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "a b", "ä"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UsageError, match=r"--name .*: letters, digits"):
        check_name(name)


def test_names() -> None:
    check_name("SmolLM2-135M.int8_row")
