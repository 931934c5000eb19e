"""The example of a service in C++, as a process of its own, driven by the official client."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headport.runtime import Generation, Generator
from tests.cpp.conftest import FLAGS, ROOT, SANITIZER_OPTIONS, locked, run
from tests.cpp.test_texts import tokenizer_library

SOURCE = ROOT / "examples" / "cpp-service"
MODEL = "tiny"
EXTRA = {"return_token_ids": True}
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
# Replies enough that nobody waits for the end, also on a fast machine.
ENDLESS = {
    "n": 4000,
    "temperature": 1.0,
    "max_tokens": 60,
    "extra_body": EXTRA | {"eos_token_id": []},
}


@pytest.fixture(scope="session")
def program(build: Path, installed: Path) -> Path:
    """The built service."""
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    found = subprocess.run(["pkg-config", "cpp-httplib"], check=False, capture_output=True)
    if found.returncode != 0:
        pytest.skip("libcpp-httplib-dev is not installed")
    folder = build / "service"
    with locked():
        run("cmake", "-S", SOURCE, "-B", folder, f"-DCMAKE_PREFIX_PATH={installed}", *FLAGS[:2])
        run("cmake", "--build", folder, "--parallel", "2")
    return folder / "headport-service"


class Served:
    """A running service."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        openai = pytest.importorskip("openai")
        self.process = process
        self.address = address
        self.client = openai.OpenAI(
            base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60
        )

    def ask(self, prompt: Any, **fields: Any) -> Any:
        return self.client.completions.create(model=MODEL, prompt=prompt, **fields)

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.address}/health", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)["stats"]
        return found

    def post(self, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            f"{self.address}/v1/completions", body, headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def stopped(self) -> tuple[int, str]:
        """Exit status and what was printed, once it is told to stop."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        return self.process.wait(60), self.process.stderr.read()


@pytest.fixture(scope="session")
def start(program: Path, onnxruntime: Path, tiny_lowered: Path) -> Callable[..., Any]:
    """`with start("--option", …) as service` → a service on a free port."""

    @contextmanager
    def started(*words: str, bundle: Path = tiny_lowered) -> Iterator[Served]:
        pytest.importorskip("openai")
        command = [program, bundle, "--port", "0", "--name", MODEL, "--threads", "1", *words]
        environment = SANITIZER_OPTIONS | {"HEADPORT_ORT": str(onnxruntime)}
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            try:
                assert process.stderr is not None
                line = process.stderr.readline()
                found = re.search(r"tiny at (http://127\.0\.0\.1:\d+)/v1", line)
                assert found, line + process.stderr.read()
                yield Served(process, found[1])
            finally:
                process.kill()

    return started


@pytest.fixture(scope="module")
def service(start: Any) -> Iterator[Served]:
    with start("--workers", "2") as found:
        yield found
        status, rest = found.stopped()
    assert status == 0, rest


@pytest.fixture(scope="module")
def generator(tiny_lowered: Path) -> Generator:
    return Generator(tiny_lowered, threads=1)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def asked(n: int) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Fields of the API, the generator's options, and a prompt: another of each for every n."""
    tokens = 3 + n % 6
    prompt = [(n * 37 + i * 11) % 256 + 1 for i in range(1 + n % 9)]
    options: dict[str, Any] = (
        {},
        {"temperature": 1.0, "seed": n, "top_k": 20},
        {"temperature": 0.8, "top_p": 0.9, "seed": n},
        {"temperature": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.3, "seed": 5},
        {"temperature": 1.0, "n": 3, "seed": 2**64 - 1, "min_p": 0.02},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "eos_token_id": 7},
        {"bad_words": [[3], [9, 4]], "suppress_tokens": [11], "min_new_tokens": 3},
        {"temperature": 1.0, "seed": n, "stop": ["e", "t", "ab"]},
    )[n % 8]
    fields = options | {"max_tokens": tokens}
    if n % 8 == 6:
        options = options | {"logit_bias": {7: 3.5, 9: -100.0}}
        fields["logit_bias"] = {"7": 3.5, "9": -100.0}
    own = (
        "temperature",
        "seed",
        "top_p",
        "n",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "max_tokens",
        "stop",
    )
    extra = {name: fields.pop(name) for name in list(fields) if name not in own}
    return fields | {"extra_body": extra | EXTRA}, options | {"max_new_tokens": tokens}, prompt


def same(choices: Any, replies: list[Generation]) -> None:
    assert [choice.token_ids for choice in choices] == [reply.token_ids for reply in replies]
    for n, (choice, reply) in enumerate(zip(choices, replies, strict=True)):
        assert choice.index == n
        assert choice.text == reply.text
        assert choice.finish_reason == FINISH[reply.finish_reason]


def test_requests_at_once_get_what_the_generator_gives(
    service: Served, generator: Generator
) -> None:
    def ask(n: int) -> Any:
        fields, _, prompt = asked(n)
        return service.ask(prompt, **fields)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(32)))
    for n, answer in enumerate(answers):
        _, options, prompt = asked(n)
        replies = generator.generate([prompt], **options)
        same(answer.choices, replies)
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == sum(len(reply.token_ids) for reply in replies)
        assert answer.object == "text_completion" and answer.model == MODEL


def test_several_prompts(service: Served, generator: Generator) -> None:
    prompts = [[5, 9, 2], [17], [40, 41, 42, 43]]
    options = {"n": 2, "temperature": 1.0, "seed": 4}
    answer = service.ask(prompts, max_tokens=5, extra_body=EXTRA, **options)
    same(answer.choices, generator.generate(prompts, max_new_tokens=5, **options))


def test_a_streamed_answer_is_the_whole_one_in_parts(service: Served, generator: Generator) -> None:
    def ask(n: int) -> list[Any]:
        fields, _, prompt = asked(n)
        usage = {"include_usage": True}
        return list(service.ask(prompt, stream=True, stream_options=usage, **fields))

    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(ask, range(8)))
    for n, (*parts, last) in enumerate(streams):
        _, options, prompt = asked(n)
        replies = generator.generate([prompt], **options)
        assert last.choices == [] and last.usage.prompt_tokens == len(prompt)
        for index, reply in enumerate(replies):
            own = [c.choices[0] for c in parts if c.choices[0].index == index]
            assert [i for choice in own for i in choice.token_ids] == reply.token_ids
            assert "".join(choice.text for choice in own) == reply.text
            assert [c.finish_reason for c in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == FINISH[reply.finish_reason]


def test_likelihoods(service: Served, generator: Generator) -> None:
    common = {"temperature": 1.0, "seed": 2}
    [reply] = generator.generate([[5, 9]], max_new_tokens=6, logprobs=2, **common)
    answer = service.ask([5, 9], max_tokens=6, logprobs=2, **common)
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx([c.logprob for c in reply.logprobs], abs=1e-4)
    assert found.tokens == [generator.spell(i) for i in reply.token_ids]
    lengths = [len(token) for token in found.tokens]
    assert found.text_offset == [sum(lengths[:n]) for n in range(6)]
    for top, choice in zip(found.top_logprobs, reply.logprobs, strict=True):
        expected = {generator.spell(t.token_id): t.logprob for t in choice.top_logprobs}
        assert top == pytest.approx(expected, abs=1e-4)
    stream = service.ask([5, 9], max_tokens=6, logprobs=2, stream=True, **common)
    parts = [token for chunk in stream for token in chunk.choices[0].logprobs.tokens]
    assert parts == found.tokens


def test_texts_go_in_with_a_tokenizer_and_are_refused_without(
    start: Any, service: Served, generator: Generator
) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="this text cannot become token ids here"):
        service.ask("The head")
    with start("--tokenizer", str(tokenizer_library())) as other:
        prompts = ["The head", "def add(a", "naïve"]
        answer = other.ask(prompts, max_tokens=5, temperature=1.0, seed=4, extra_body=EXTRA)
        same(
            answer.choices,
            generator.generate(prompts, max_new_tokens=5, temperature=1.0, seed=4),
        )
        mixed = other.ask([[5, 9, 2], "The head"], max_tokens=3, extra_body=EXTRA)
        same(mixed.choices, generator.generate([[5, 9, 2], "The head"], max_new_tokens=3))


def test_a_bundle_without_a_tokenizer_takes_ids_and_gives_ids(
    start: Any, generator: Generator, tiny_lowered: Path, tmp_path: Path
) -> None:
    import openai

    bare = tmp_path / "bare"
    shutil.copytree(tiny_lowered, bare)
    manifest = json.loads((bare / "manifest.json").read_text())
    del manifest["files"]["tokenizer.json"]
    (bare / "manifest.json").write_text(json.dumps(manifest))
    (bare / "tokenizer.json").unlink()
    [reply] = generator.generate([[5, 9]], max_new_tokens=4)
    with start(bundle=bare) as service:
        answer = service.ask([5, 9], max_tokens=4, extra_body=EXTRA)
        assert answer.choices[0].token_ids == reply.token_ids and answer.choices[0].text == ""
        for fields in ({}, {"extra_body": EXTRA, "logprobs": 1}):
            with pytest.raises(openai.BadRequestError, match="this service has no texts"):
                service.ask([5, 9], **fields)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"extra_body": {"guidance": 2}}, "guidance is not a field"),
    "several at once": ({"best_of": 4, "echo": True}, "best_of=4 is not supported; echo=true"),
    "unknown id": ({"prompt": [3, 257]}, "prompt 0 holds 257, ids from 0 to 256 were expected"),
    "no prompt": ({"prompt": []}, "at least one prompt was expected"),
    "odd prompt": ({"prompt": [[1], {}]}, "prompt: a text, a list of token ids"),
    "stop": ({"stop": [3]}, "stop: a text, or a list of texts, was expected"),
    "logprobs": ({"logprobs": -1}, "logprobs: a whole number from 0 up"),
    "huge id": ({"prompt": [2**63]}, "a whole number was expected, 9223372036854775808"),
    "context": ({"max_tokens": 64}, "1 tokens and 64 more are to follow, but the context holds 64"),
    "long prompt": ({"prompt": [3] * 80}, "prompt 0 has 80 tokens and at least 1 more"),
    "range": ({"temperature": -1}, "temperature must be a number from 0"),
    "type": ({"temperature": "hot"}, 'temperature: a number was expected, "hot" was given'),
    "no effect": ({"top_p": 0.5}, "would have no effect"),
    "tokens": ({"max_tokens": 2000}, "2000 tokens exceed 1024 per reply"),
    "no tokens": ({"max_tokens": 0}, "max_tokens: a whole number from 1 up"),
    "replies": ({"n": 40, "temperature": 1}, "1 prompts times n=40 exceed 32 replies"),
    "bias": ({"logit_bias": {"x": 1}}, "logit_bias: a mapping such as"),
    "bias beyond": ({"logit_bias": {"300": 1}}, "logit_bias: 300"),
    "seed": ({"seed": -1}, "seed: a whole number from 0"),
    "stream options": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "unknown field include_obfuscation",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(service: Served, case: str) -> None:
    import openai

    fields, message = REFUSED[case]
    given = {"prompt": [5], "extra_body": EXTRA} | fields
    with pytest.raises(openai.BadRequestError) as found:
        service.ask(**given)
    assert message in found.value.body["message"]
    assert found.value.body["type"] == "invalid_request_error"


def test_bodies_that_are_none(start: Any) -> None:
    deep = b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    with start("--max-body-bytes", "20000") as service:
        for body, status, message in (
            (b"", 400, "the body must be a JSON object"),
            (b"{", 400, "the body must be a JSON object"),
            (b"[1]", 400, "the body must be a JSON object"),
            (b"\xff\xfe", 400, "the body must be a JSON object"),
            (b'{"prompt": [1], "return_token_ids": true}', 404, "none was asked for"),
            (b'{"prompt": [' + b"1," * 20000 + b"1]}", 413, "at most 20000 bytes"),
            (deep, 400, "nested too deep"),
            (b'{"prompt": [1], "temperature": 1' + b"0" * 400 + b"}", 400, "JSON object"),
        ):
            code, document = service.post(body)
            assert (code, message in document["error"]["message"]) == (status, True), document
        form = {"Content-Type": "multipart/form-data; boundary=x"}
        code, document = service.post(b"--x\r\n\r\n", **form)
        assert code == 400 and "a form came" in document["error"]["message"]
        assert service.ask([5], max_tokens=1, extra_body=EXTRA).choices


def test_a_body_without_end_is_refused_and_not_kept(start: Any) -> None:
    with start("--max-body-bytes", "1000") as service:
        host, port = service.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as sender:
            sender.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            with pytest.raises(OSError, match=r"[Bb]roken|reset"):
                for _ in range(10_000):
                    sender.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
        assert service.ask([5], max_tokens=1, extra_body=EXTRA).choices


def test_addresses(service: Served) -> None:
    import openai

    assert [model.id for model in service.client.models.list()] == [MODEL]
    assert service.client.models.retrieve(MODEL).owned_by == "headport"
    with pytest.raises(openai.NotFoundError, match="'tiny' is served here, 'gpt' was asked for"):
        service.client.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match="the service has GET /health"):
        service.client.embeddings.create(model=MODEL, input="a")
    # Only this machine's own address that was asked for is open.
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", int(service.address.rpartition(":")[2])))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(
    start: Any, generator: Generator, stream: bool
) -> None:
    with start("--max-replies", "4000") as service:
        if stream:
            answer = service.ask([5], stream=True, **ENDLESS)
            next(iter(answer))
            answer.close()
        else:
            impatient = service.client.with_options(timeout=0.3)
            with pytest.raises(Exception, match="timed out"):
                impatient.completions.create(model=MODEL, prompt=[5], **ENDLESS)
        until(lambda: service.health()["failed"] == 1)
        assert service.health()["running"] == 0
        [reply] = generator.generate([[5, 9]], max_new_tokens=4)
        same(service.ask([5, 9], max_tokens=4, extra_body=EXTRA).choices, [reply])


def test_a_full_or_slow_service_says_so(start: Any) -> None:
    import openai

    limits = ("--max-replies", "4000", "--max-waiting", "1", "--timeout", "1.5")
    with start(*limits) as service, ThreadPoolExecutor(2) as pool:
        late = []
        for _ in range(2):
            late.append(pool.submit(service.ask, [5], **ENDLESS))
            until(lambda: service.health()["requests"] == len(late))
            until(lambda: service.health()["running"] == 1)
        with pytest.raises(openai.RateLimitError, match="1 requests wait") as refused:
            service.ask([5], max_tokens=1, extra_body=EXTRA)
        assert refused.value.response.headers["Retry-After"] == "1"
        for each in late:
            with pytest.raises(openai.InternalServerError, match=r"done after 1\.5") as found:
                each.result()
            assert found.value.status_code == 504
        until(lambda: service.health()["running"] == 0)
        assert service.ask([5], max_tokens=1, extra_body=EXTRA).choices


def test_stopping_lets_what_runs_end(start: Any, generator: Generator) -> None:
    import openai

    with start("--max-replies", "100") as service:
        fields = {"n": 100, "temperature": 1.0, "seed": 3, "max_tokens": 40}
        stream = service.ask([5], stream=True, extra_body=EXTRA, **fields)
        first = next(iter(stream))
        service.process.send_signal(signal.SIGTERM)
        until(lambda: closed(service))
        with pytest.raises(openai.InternalServerError, match="about to end") as found:
            service.ask([5], max_tokens=1, extra_body=EXTRA)
        assert found.value.status_code == 503
        found_ids: dict[int, list[int]] = {}
        for part in [first, *stream]:
            found_ids.setdefault(part.choices[0].index, []).extend(part.choices[0].token_ids)
        assert service.process.wait(60) == 0
        assert service.process.stderr is not None
        assert re.fullmatch(r"\[1 requests, \d+ tokens\]\n", service.process.stderr.read())
    assert sorted(found_ids) == list(range(100))
    expected = generator.generate([[5]], n=20, temperature=1.0, seed=3, max_new_tokens=40)
    assert [found_ids[n] for n in range(20)] == [reply.token_ids for reply in expected]


def closed(service: Served) -> bool:
    try:
        service.health()
    except urllib.error.HTTPError as error:
        return error.code == 503
    return False


def test_stopping_ends_what_takes_too_long(start: Any) -> None:
    import openai

    with start("--max-replies", "4000", "--grace", "0.2") as service:
        stream = service.ask([5], stream=True, **ENDLESS)
        next(iter(stream))
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(service.stopped)
            with pytest.raises(openai.APIError, match="about to end"):
                list(stream)
            status, rest = stopped.result()
    assert status == 0, rest


def test_replies_without_a_number_are_limited(start: Any) -> None:
    with start("--max-new-tokens", "6") as service:
        answer = service.ask([5], extra_body=EXTRA | {"eos_token_id": []})
    assert len(answer.choices[0].token_ids) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "a bundle's folder was expected"),
        (("one", "two"), "one bundle was expected, 'two' was given as well"),
        (("one", "--batch", "3"), "--batch is not an option"),
        (("one", "--port"), "--port: a value was expected"),
        (("one", "--port", "70000"), "a number up to 65535 was expected, 70000"),
        (("one", "--workers", "0"), "--workers: a whole number from 1 up was expected, '0'"),
        (("one", "--timeout", "-1"), "--timeout: a number of seconds above 0"),
        (("nowhere", "--port", "0"), "nowhere: a bundle folder was expected"),
    ],
)
def test_wrong_words_are_refused(program: Path, words: tuple[str, ...], message: str) -> None:
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, check=False, env=SANITIZER_OPTIONS
    )
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_a_port_that_is_taken(program: Path, service: Served) -> None:
    port = service.address.rpartition(":")[2]
    done = subprocess.run(
        [program, "one", "--port", port], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"127.0.0.1:{port} cannot be listened on" in done.stderr
