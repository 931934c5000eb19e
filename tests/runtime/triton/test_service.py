"""The service behind `model.py`, with a stand-in for the python backend."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headport.bundle import Bundle
from headport.errors import RequestError
from headport.runtime import Generator
from headport.runtime.triton import served_model
from headport.runtime.triton.responder import Responder
from headport.runtime.triton.service import Service
from tests.runtime.triton.fake_backend import MODULE, Request, TritonModelException

PROMPTS = ["The head", "def add", "naïve café", "Quantisation rounds"]
OPTIONS = {"max_tokens": 9, "temperature": 0.9, "seed": 3}


def arguments(bundle: Path, tmp: Path, **parameters: str) -> dict[str, str]:
    (tmp / "1").mkdir(exist_ok=True)
    place = tmp / "1" / "bundle"
    if not place.exists():
        place.symlink_to(bundle)
    entries = {f"headport.{name}": {"string_value": value} for name, value in parameters.items()}
    return {
        "model_config": json.dumps({"parameters": entries | {"other": {"string_value": "x"}}}),
        "model_repository": str(tmp),
        "model_version": "1",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }


@pytest.fixture(scope="module")
def service(tiny_lowered: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("model")
    settings = {"threads": "1", "slots": "3", "max_new_tokens": "40", "max_replies": "4"}
    found = Service(arguments(tiny_lowered, folder, **settings), MODULE)
    yield found
    found.close()


@pytest.fixture(scope="module")
def generator(tiny_lowered: Path) -> Iterator[Generator]:
    with Generator(tiny_lowered, threads=1) as found:
        yield found


def ask(service: Service, *requests: Request) -> None:
    service.take(requests)


def test_streams_and_whole_replies_are_the_generators(
    service: Service, generator: Generator
) -> None:
    streamed = [Request(text_input=p, sampling_parameters=OPTIONS, stream=True) for p in PROMPTS]
    whole = [Request(dict(OPTIONS), text_input=p) for p in PROMPTS]
    ask(service, *streamed, *whole)
    expected = generator.generate(PROMPTS, max_new_tokens=9, temperature=0.9, seed=3)
    for one, other, reply in zip(streamed, whole, expected, strict=True):
        parts = one.wait()
        assert "".join(part.text for part in parts) == reply.text
        assert [int(part.outputs["output_ids"][0]) for part in parts] == reply.token_ids
        reasons = [part.outputs["finish_reason"][0].decode() for part in parts]
        assert reasons == [""] * (len(parts) - 1) + [reply.finish_reason]
        assert ["seed" in part.outputs for part in parts] == [False] * (len(parts) - 1) + [True]
        [answer] = other.wait()
        assert answer.text == reply.text
        assert answer.outputs["output_ids"].tolist() == reply.token_ids
        assert answer.outputs["reply_lengths"].tolist() == [len(reply.token_ids)]
        assert answer.outputs["seed"].tolist() == [3]


def test_several_replies(service: Service, generator: Generator) -> None:
    request = Request(text_input="The head", sampling_parameters={**OPTIONS, "n": 3})
    ask(service, request)
    [answer] = request.wait()
    expected = generator.generate("The head", max_new_tokens=9, temperature=0.9, seed=3, n=3)
    assert [t.decode() for t in answer.outputs["text_output"]] == [r.text for r in expected]
    lengths = answer.outputs["reply_lengths"].tolist()
    assert lengths == [len(r.token_ids) for r in expected]
    assert sum(lengths) == len(answer.outputs["output_ids"])


def test_a_greedy_reply_has_no_seed(service: Service) -> None:
    request = Request(input_ids=[5, 6], sampling_parameters={"max_tokens": 2})
    ask(service, request)
    assert "seed" not in request.wait()[0].outputs


def test_messages_go_through_the_chat_template(service: Service, generator: Generator) -> None:
    messages = [{"role": "user", "content": "add"}]
    request = Request(messages=messages, sampling_parameters={"max_tokens": 3})
    ask(service, request)
    expected = generator.generate([generator.chat_ids(messages)], max_new_tokens=3)
    assert request.wait()[0].outputs["output_ids"].tolist() == expected[0].token_ids


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (Request(), "INVALID_ARG", "one of the inputs"),
        (Request(input_ids=[999]), "INVALID_ARG", "999, ids from 0 to 256"),
        (Request(text_input="a", sampling_parameters={"top_k": -1}), "INVALID_ARG", "top_k must"),
        (Request({"max_tokens": 41}, text_input="a"), "INVALID_ARG", "41 tokens exceed 40"),
        (Request({"n": 5}, text_input="a"), "INVALID_ARG", "n=5 exceed 4 replies"),
        (
            Request({"n": 2, "temperature": 1}, text_input="a", stream=True),
            "INVALID_ARG",
            "stream",
        ),
    ],
)
def test_refusals_reach_the_client(
    service: Service, request_: Request, code: str, message: str
) -> None:
    ask(service, request_)
    error = request_.error()
    assert error.code == getattr(MODULE.TritonError, code)
    assert message in str(error)


def test_an_unknown_fault_is_not_told(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("a secret")

    monkeypatch.setattr(service._generator, "submit", fail)
    request = Request(text_input="a")
    ask(service, request)
    assert str(request.error()).endswith("the server's log tells why")
    assert "ValueError: a secret" in "".join(capsys.readouterr())


def test_a_client_that_has_gone_frees_its_slot(
    tiny_lowered: Path, tmp_path: Path, generator: Generator
) -> None:
    service = Service(arguments(tiny_lowered, tmp_path, threads="1", slots="1"), MODULE)
    try:
        long = {"max_tokens": 60, "eos_token_id": []}
        first, waiting = (Request(long, input_ids=[5], stream=True) for _ in range(2))
        last = Request({"max_tokens": 2}, input_ids=[5])
        ask(service, first, waiting)
        waiting.cancelled = True  # it never gets a slot
        while not first.responses:
            time.sleep(0.001)
        first.cancelled = True
        ask(service, last)
        assert last.wait()[0].error is None
        assert waiting.error().code == MODULE.TritonError.CANCELLED
        end = first.wait()[-1]
        assert end.error is None or end.error.code == MODULE.TritonError.CANCELLED
    finally:
        service.close()


def test_triton_is_not_asked_about_a_request_that_has_ended() -> None:
    request = Request()
    responder = Responder(MODULE, request)
    assert not responder.cancelled
    responder.fail(RequestError("no"))
    request.cancelled = True
    assert not responder.cancelled
    responder.fail(RequestError("twice"))
    assert len(request.wait()) == 1


def test_what_runs_when_the_model_is_unloaded_is_told(tiny_lowered: Path, tmp_path: Path) -> None:
    service = Service(arguments(tiny_lowered, tmp_path, threads="1", slots="1"), MODULE)
    requests = [
        Request({"max_tokens": 60, "eos_token_id": []}, input_ids=[5], stream=True)
        for _ in range(4)
    ]
    ask(service, *requests)
    service.close()
    for request in requests:
        assert request.wait()  # each has its last response
    assert requests[-1].error().code == MODULE.TritonError.UNAVAILABLE
    assert not service._thread.is_alive()


def test_a_bundle_that_cannot_be_served(tiny_lowered: Path, tmp_path: Path) -> None:
    given = arguments(tiny_lowered, tmp_path)
    (tmp_path / "1" / "bundle").unlink()
    with pytest.raises(TritonModelException, match="a bundle folder was expected"):
        Service(given, MODULE)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"slot": "3"}, r"parameters headport\.\*: .*unknown field `slot`"),
        ({"slots": "many"}, r"parameters headport\.\*: "),
        ({"exact": "perhaps"}, r"parameters headport\.\*: "),
        ({"max_context": "4096"}, "max_context must be from 1 to the model's 64"),
        ({"timeout": "0"}, "limits must be above 0"),
    ],
)
def test_wrong_parameters(
    tiny_lowered: Path, tmp_path: Path, entry: dict[str, str], message: str
) -> None:
    with pytest.raises(TritonModelException, match=message):
        Service(arguments(tiny_lowered, tmp_path, **entry), MODULE)


def test_another_gpu_is_refused(tiny_lowered: Path, tmp_path: Path) -> None:
    given = arguments(tiny_lowered, tmp_path)
    given |= {"model_instance_kind": "GPU", "model_instance_device_id": "1"}
    with pytest.raises(TritonModelException, match="an instance on GPU 1 was asked for"):
        Service(given, MODULE)


def test_model_py_explains_what_is_missing(
    tiny_lowered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served_model.TritonPythonModel()
    monkeypatch.setitem(served_model.sys.modules, "headport.runtime.triton.service", None)
    with pytest.raises(RuntimeError, match=r"headport\.runtime\.triton\.service is not installed"):
        model.initialize(arguments(tiny_lowered, tmp_path))
    monkeypatch.setattr(served_model.sys, "version_info", (3, 10, 12))
    with pytest.raises(RuntimeError, match=r"Python 3\.11 or newer, .* embeds 3\.10\.12"):
        model.initialize({})


def test_model_py_hands_on(
    tiny_lowered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(served_model.sys.modules, "triton_python_backend_utils", MODULE)
    model = served_model.TritonPythonModel()
    model.initialize(arguments(tiny_lowered, tmp_path, threads="1"))
    request = Request({"max_tokens": 1}, input_ids=[5])
    assert model.execute([request]) is None
    assert request.wait()[0].error is None
    model.finalize()


def test_the_bundle_is_checked_when_it_is_loaded(tiny_lowered: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(tiny_lowered, folder)
    file = folder / Bundle.open(folder).manifest.backbone.file
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(TritonModelException, match=r"is damaged: .*changed"):
        Service(arguments(folder, tmp_path), MODULE)
