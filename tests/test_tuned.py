"""Recorded threads count on the kind of machine they were measured on, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headport import tuned
from headport.errors import BundleError
from headport.manifest import Manifest, Tuning, decode_manifest, encode_manifest
from headport.session import SessionSettings
from tests.bundles import manifest

HERE = ("Some CPU (model 1)", 8)
RECORD = {
    "cpu": HERE[0],
    "cpus": HERE[1],
    "instructions": ["avx2"],
    "onnxruntime": "1.32.0",
    "threads": 3,
    "spinning": False,
}


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "cpu_model", lambda: HERE[0])
    monkeypatch.setattr(tuned, "usable_cpus", lambda: HERE[1])
    tuned._say_once.cache_clear()


def _manifest(*changes: dict[str, Any]) -> Manifest:
    records = tuple(msgspec.convert(RECORD | change, Tuning) for change in changes)
    return manifest(target="ort-cpu", tuned=records)


def _threads(found: SessionSettings) -> tuple[int, bool]:
    return found.threads, found.spinning


def test_the_record_of_this_machine_is_used_whichever_it_is() -> None:
    first, second = {"threads": 1}, {"cpu": "Another", "threads": 8}
    assert _threads(tuned.settings_of(_manifest({}, second))) == (3, False)
    assert _threads(tuned.settings_of(_manifest(second, first))) == (1, False)
    spins = tuned.settings_of(_manifest({"spinning": True}), SessionSettings(provider="cpu"))
    assert (_threads(spins), spins.provider) == ((3, True), "CPUExecutionProvider")


@pytest.mark.parametrize("change", [{"cpu": "Some CPU (model 2)"}, {"cpus": 7}, {"cpus": 16}])
def test_a_record_of_another_machine_is_not_used_and_that_is_said_once(
    change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert _threads(tuned.settings_of(_manifest(change))) == (0, True)
    said = capsys.readouterr().out
    assert said.count("threads were measured on") == 1
    assert "this process has 8 CPUs of Some CPU (model 1)" in said
    assert "`headport tune`" in said


def test_a_number_of_the_caller_wins_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    for found in (_manifest({}), _manifest({"cpus": 7}), _manifest()):
        assert _threads(tuned.settings_of(found, SessionSettings(threads=5))) == (5, True)
    assert _threads(tuned.settings_of(_manifest())) == (0, True)
    assert capsys.readouterr().out == ""


def test_machines_in_words() -> None:
    assert tuned.machine_text(1, "C") == "1 CPU of C"
    assert tuned.machine_text(2, "") == "2 CPUs of no known model"


def test_manifests_without_records_stay_as_they_were() -> None:
    text = encode_manifest(manifest())
    assert b"tuned" not in text
    assert decode_manifest(text, "m").tuned == ()
    kept = _manifest({}, {"cpu": "Another"})
    assert decode_manifest(encode_manifest(kept), "m") == kept


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"threads": -1}, r"`int` >= 1 - at `\$\.tuned\[0\]\.threads`"),
        ({"threads": 0}, "`int` >= 1"),
        ({"threads": 9}, "as many threads as CPUs were expected, 9 threads on 8 CPUs"),
        ({"cpus": 2000}, "`int` <= 1024"),
        ({"threads": "3"}, "Expected `int`, got `str`"),
        ({"threads": 2.5}, "Expected `int`"),
        ({"spinning": 1}, "Expected `bool`, got `int`"),
        ({"cpu": ""}, "length >= 1"),
        ({"surprise": 1}, "unknown field `surprise`"),
    ],
)
def test_wrong_records_are_refused(change: dict[str, Any], words: str) -> None:
    document = json.loads(encode_manifest(_manifest({})))
    document["tuned"][0] |= change
    with pytest.raises(BundleError, match=f"m: .*{words}"):
        decode_manifest(json.dumps(document).encode(), "m")


@pytest.mark.parametrize("value", [None, RECORD, [1], "8"])
def test_records_are_a_list_of_records(value: Any) -> None:
    document = json.loads(encode_manifest(_manifest({}))) | {"tuned": value}
    with pytest.raises(BundleError, match=r"\$\.tuned"):
        decode_manifest(json.dumps(document).encode(), "m")
