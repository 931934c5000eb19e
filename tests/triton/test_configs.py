"""Configurations: read by Triton's own parser, refused where they are wrong, explained."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headport.bundle import Bundle
from headport.runtime.triton.command import Options, triton
from tests.runtime.triton.test_command import plans
from tests.triton.server import NEEDS_TRITON, Server, running

pytestmark = NEEDS_TRITON


@pytest.fixture(scope="module")
def repository(
    tiny_bundle: Path,
    tiny_lowered: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Models of all backends, and some that were broken afterwards."""
    folder = tmp_path_factory.mktemp("configs")
    output = folder / "repository"
    with_plans = plans(tiny_bundle, folder / "plans")
    for bundle, changes in (
        (tiny_lowered, {"name": "tiny"}),
        (tiny_lowered, {"name": "whole", "whole_replies": True, "environment": '/a "b"'}),
        (tiny_bundle, {"name": "graphs", "backend": "onnxruntime"}),
        (with_plans, {"name": "plans", "backend": "tensorrt", "gpus": (0, 1)}),
    ):
        triton(Options(bundle=bundle, output=output, **changes))
    return output


def parsed(repository: Path, name: str) -> Any:
    protocol = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    from google.protobuf import text_format

    text = (repository / name / "config.pbtxt").read_text()
    return text_format.Parse(text, protocol.ModelConfig())


def test_all_are_model_configurations(repository: Path) -> None:
    names = sorted(p.name for p in repository.iterdir())
    assert names == ["graphs_backbone", "graphs_head_lm", "plans_backbone", "tiny", "whole"]
    for name in names:
        assert parsed(repository, name).name == name


def test_the_generating_models(repository: Path) -> None:
    tiny, whole = (parsed(repository, name) for name in ("tiny", "whole"))
    assert tiny.model_transaction_policy.decoupled and not whole.model_transaction_policy.decoupled
    assert [i.name for i in tiny.input][-1] == "stream" and all(i.optional for i in tiny.input)
    assert whole.parameters["EXECUTION_ENV_PATH"].string_value == '/a "b"'
    assert tiny.parameters["headport.max_new_tokens"].string_value == "1024"
    assert tiny.max_batch_size == 0 and not tiny.HasField("dynamic_batching")


def test_graphs_and_plans(repository: Path) -> None:
    graph = parsed(repository, "graphs_backbone")
    assert graph.backend == "onnxruntime" and graph.max_batch_size == 8
    assert graph.dynamic_batching.max_queue_delay_microseconds == 100
    [ids] = [i for i in graph.input if i.name == "input_ids"]
    assert list(ids.dims) == [-1] and ids.data_type == 9  # TYPE_INT64
    plan = parsed(repository, "plans_backbone")
    [group] = plan.instance_group
    assert (list(group.gpus), list(group.profile), group.kind) == ([0, 1], ["0", "1"], 1)


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(repository, tmp_path_factory.mktemp("server")) as found:
        yield found


def refusal(server: Server, name: str) -> str:
    """What loading a model is answered with, and what the server says meanwhile."""
    http = pytest.importorskip("tritonclient.http")
    before = len(server.said())
    with (
        http.InferenceServerClient(server.http, network_timeout=120) as client,
        pytest.raises(http.InferenceServerException) as caught,
    ):
        client.load_model(name)
    return f"{caught.value} {server.said()[before:]}"


@pytest.mark.parametrize(
    ("name", "backend"), [("graphs_head_lm", "onnxruntime"), ("plans_backbone", "tensorrt")]
)
def test_a_backend_that_is_not_there(server: Server, name: str, backend: str) -> None:
    # The configuration is read, and only then is the backend looked for.
    assert f"unable to find backend library for backend '{backend}'" in refusal(server, name)


def broken(repository: Path, name: str) -> Path:
    target = repository / name
    shutil.copytree(repository / "tiny", target)
    config = target / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "tiny"', f'name: "{name}"', 1))
    return target


def test_a_text_that_is_no_configuration(server: Server, repository: Path) -> None:
    config = broken(repository, "no_text") / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 0", "max_batch_size: none"))
    found = refusal(server, "no_text")
    assert "failed to read text proto" in found and "ModelConfig: 4:" in found, found


def test_an_environment_that_is_not_there(server: Server, repository: Path) -> None:
    config = broken(repository, "no_environment") / "config.pbtxt"
    extra = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/nowhere" } }\n'
    config.write_text(config.read_text() + extra)
    assert "/nowhere" in refusal(server, "no_environment")


def test_headport_that_is_not_there(server: Server, repository: Path) -> None:
    broken(repository, "no_headport")  # without an environment: Triton's own interpreter
    found = refusal(server, "no_headport")
    assert "the package headport is not installed for the Python 3." in found, found


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("odd_entry", ("headport.slots", "headport.slot"), "unknown field `slot`"),
        ("odd_value", ('string_value: "300.0"', 'string_value: "0"'), "limits must be above 0"),
    ],
)
def test_wrong_entries(
    server: Server, repository: Path, name: str, change: tuple[str, str], says: str
) -> None:
    import sys

    config = broken(repository, name) / "config.pbtxt"
    extra = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{sys.prefix}" }} }}\n'
    config.write_text(config.read_text().replace(*change) + extra)
    assert says in refusal(server, name)


def test_an_incomplete_copy(server: Server, repository: Path) -> None:
    import sys

    folder = broken(repository, "incomplete")
    bundle = folder / "1" / "bundle"
    (bundle / Bundle.open(bundle).manifest.backbone.file).unlink()
    config = folder / "config.pbtxt"
    extra = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{sys.prefix}" }} }}\n'
    config.write_text(config.read_text() + extra)
    assert "is damaged: backbone.onnx: missing" in refusal(server, "incomplete")
