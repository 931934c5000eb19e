"""What is measured is recorded, used on this kind of machine, and checked before it is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headport import tuned
from headport.bundle import MANIFEST, Bundle
from headport.cli import main
from headport.errors import BundleError, HeadportError, LoweringError, ParityError
from headport.inspection import describe
from headport.manifest import SelftestTolerance, encode_manifest
from headport.memory import measure_memory
from headport.runtime import Generator
from headport.runtime.tuning import command, measure
from headport.runtime.tuning.candidates import Candidate
from headport.runtime.tuning.command import Options, tune
from headport.runtime.tuning.measure import Task, measure_apart, measure_here
from headport.runtime.tuning.table import Measured

CPU, CPUS = "Some CPU (model 1)", 4
TIMES = {(1, False): 30.0, (2, False): 9.0, (2, True): 10.0, (4, False): 12.0, (4, True): 11.0}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """This process on another machine."""

    def become(cpu: str = CPU, cpus: int = CPUS) -> None:
        for module in (command, tuned):
            monkeypatch.setattr(module, "cpu_model", lambda: cpu)
            monkeypatch.setattr(module, "usable_cpus", lambda: cpus)
        monkeypatch.setattr(command, "physical_cores", lambda: cpus)

    become()
    return become


def _timer(times: dict[tuple[int, bool], float], answers: str = "same") -> Any:
    def timed(task: Task, candidate: Candidate) -> Measured:
        del task
        ms = times[candidate.threads, candidate.spinning]
        return Measured(ms, 2 * ms, answers if candidate.threads > 1 else "same")

    return timed


def _tuned(source: Path, output: Path, times: Any = None, **options: Any) -> Bundle:
    return tune(Options(bundle=source, output=output, **options), _timer(times or TIMES))


def _session(generator: Generator) -> tuple[int, str]:
    """What ONNX Runtime was told: threads, and how they wait."""
    options = generator._runner._backbone._inner.get_session_options()
    try:
        waiting = options.get_session_config_entry("session.intra_op.allow_spinning")
    except RuntimeError:  # no such entry
        waiting = "as usual"
    return options.intra_op_num_threads, waiting


def test_the_least_is_recorded_and_nothing_else_changes(
    machine: Any, tiny_lowered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved = []
    run_selftest = command.run_selftest

    def spy(bundle: Bundle, settings: Any) -> Any:
        proved.append((bundle.manifest.tuned[-1].threads, settings.threads, settings.spinning))
        return run_selftest(bundle, settings)

    monkeypatch.setattr(command, "run_selftest", spy)
    before = (tiny_lowered / MANIFEST).read_bytes()
    found = _tuned(tiny_lowered, tmp_path / "out")
    assert proved == [(2, 2, False)]
    source, written = Bundle.open(tiny_lowered).manifest, Bundle.open(found.path).manifest
    assert written.files == source.files
    assert (tiny_lowered / MANIFEST).read_bytes() == before
    [record] = written.tuned
    assert (record.cpu, record.cpus, record.threads, record.spinning) == (CPU, CPUS, 2, False)
    stage = written.provenance.stages[-1]
    assert (stage.stage, stage.report["chosen"]) == ("tune", {"threads": 2, "spinning": False})
    rows = {(row["threads"], row["spinning"]): row["decode_ms"] for row in stage.report["rows"]}
    assert rows == TIMES
    bare = msgspec.structs.replace(written, tuned=(), provenance=source.provenance)
    assert bare == source


def test_a_record_counts_where_it_was_made(
    machine: Any, tiny_lowered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = _tuned(tiny_lowered, tmp_path / "out").path
    with Generator(bundle) as here:
        assert _session(here) == (2, "0")
        stats = here.stats
        assert (stats.threads, stats.spinning, stats.tuned) == (2, False, True)
        text = describe(here.bundle).text()
        assert f"2 threads, not spinning, measured with ONNX Runtime {_version()} on 4" in text
        assert "which is this machine" in text
    with Generator(bundle, threads=3) as named:
        assert _session(named) == (3, "as usual")
        assert (named.stats.threads, named.stats.tuned) == (3, False)
    assert "measured on" not in capsys.readouterr().out
    machine(cpus=1)
    with Generator(bundle) as elsewhere:
        assert not elsewhere.stats.tuned and elsewhere.stats.threads >= 1
        assert _session(elsewhere)[1] == "as usual"
        assert "which is not this machine" in describe(elsewhere.bundle).text()
    assert "measured on 4 CPUs of Some CPU (model 1); this" in capsys.readouterr().out


def _version() -> str:
    from headport.session import library_version

    return library_version()


def test_tuning_again_replaces_what_was_recorded_of_this_machine(
    machine: Any, tiny_lowered: Path, tmp_path: Path
) -> None:
    first = _tuned(tiny_lowered, tmp_path / "first").path
    machine(cpus=2)
    second = _tuned(first, tmp_path / "second", threads=(1,)).path
    machine()
    third = _tuned(second, tmp_path / "third", TIMES | {(4, True): 1.0})
    found = {(each.cpus, each.threads, each.spinning) for each in third.manifest.tuned}
    assert found == {(2, 1, False), (4, 4, True)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 0, "steps": 0}, "--rounds: at least 1 expected, 0 given; --steps: at least 1"),
        ({"prompt": 0}, "--prompt: at least 1"),
        ({"margin": 1.0}, "--margin: a share from 0 up to 1 was expected, 1.0 given"),
        ({"margin": -0.1}, "--margin"),
        ({"threads": (2, 5)}, "from 1 to the 4 CPUs .* expected, 5 given"),
        ({"head": "value"}, r"no head 'value' in it \(heads: lm\)"),
    ],
)
def test_wrong_options_are_refused(
    machine: Any, tiny_lowered: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(HeadportError, match=words):
        _tuned(tiny_lowered, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_tuned_is_refused(
    machine: Any, tiny_bundle: Path, tiny_lowered: Path, tmp_path: Path
) -> None:
    with pytest.raises(LoweringError, match="lowered to ort-cpu was expected, target portable"):
        _tuned(tiny_bundle, tmp_path / "out")
    machine(cpu="")
    with pytest.raises(HeadportError, match="does not name the model of its CPU"):
        _tuned(tiny_lowered, tmp_path / "out")
    machine()
    with pytest.raises(HeadportError, match="choose another output"):
        _tuned(tiny_lowered, tiny_lowered, force=True)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_self_test_writes_nothing(
    machine: Any, tiny_lowered: Path, tmp_path: Path
) -> None:
    source = Bundle.open(tiny_lowered)
    strict = msgspec.structs.replace(
        source.manifest, selftest=SelftestTolerance(hidden_states=-1.0, logits=-1.0)
    )
    broken = Path(shutil.copytree(tiny_lowered, tmp_path / "broken"))
    (broken / MANIFEST).write_bytes(encode_manifest(strict))
    with pytest.raises(ParityError, match="with 2 threads, not spinning the bundle fails its self"):
        _tuned(broken, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_other_bits_are_told(
    machine: Any, tiny_lowered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(bundle=tiny_lowered, output=tmp_path / "out")
    found = tune(options, _timer(TIMES, answers="other"))
    report = found.manifest.provenance.stages[-1].report
    assert report["same_answers"] is False
    lines = list(command._lines("out", found.manifest, report))
    assert lines[-1].startswith("answers of all of them: not the same bits")
    assert [line[0] for line in lines[3:8]] == [" ", "→", " ", " ", " "]


def test_a_run_is_that_of_a_generator(tiny_lowered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(bundle=str(tiny_lowered), head="lm", prompt=20, steps=6)
    one, two = (measure_here(task, Candidate(count, False)) for count in (1, 2))
    assert one.decode_ms > 0 and one.prompt_ms > 0
    assert one.answers == two.answers
    outputs = measure._outputs

    def off_by_a_bit(*arguments: Any) -> list[np.ndarray]:
        hidden, *others = outputs(*arguments)
        return [np.nextafter(hidden, np.float32(np.inf)), *others]

    monkeypatch.setattr(measure, "_outputs", off_by_a_bit)
    assert measure_here(task, Candidate(1, False)).answers != one.answers


def test_what_a_process_says_at_its_end_is_handed_on(tmp_path: Path) -> None:
    task = Task(bundle=str(tmp_path / "none"), head="lm", prompt=1, steps=1)
    with pytest.raises(BundleError, match=r"with 1 thread it does not run: .*nothing is there"):
        measure_apart(task, Candidate(1, False))


def test_a_bundle_is_tuned_on_the_command_line(
    tiny_lowered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", str(tiny_lowered), "-o", str(tmp_path / "out"), "--threads", "1"]
    words += ["--rounds", "1", "--steps", "3", "--json", str(tmp_path / "found.json")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "→ 1 thread" in said and "recorded: 1 thread; the self-test passed with it" in said
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["rows"][0]["decode_ms"] > 0
    assert (report["prompt"], report["steps"], report["same_answers"]) == (32, 3, True)
    with Generator(tmp_path / "out") as generator:
        assert generator.stats.tuned
    assert measure_memory(tmp_path / "out").total > 0
