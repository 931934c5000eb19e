"""`headport gpu-check` from options to report, on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headport import gpu_probe
from headport.bundle import Bundle
from headport.cli import main
from headport.errors import OutputError, UsageError
from headport.gpu_probe import GpuProbe
from headport.validate.gpu import command, hardware
from headport.validate.gpu.command import STEPS, Options, gpu_check
from headport.validate.gpu.markdown import render_markdown, render_terminal
from headport.validate.gpu.report import GpuReport, StepRecord
from tests.toy_bundles import write_toy

NAMES = [step.name for step in STEPS]


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A bundle, on a machine without a driver, whatever this one has."""
    nothing = GpuProbe(None, (), "there is no driver")
    for module in (command, hardware, gpu_probe):
        monkeypatch.setattr(module, "probe_gpu", lambda: nothing)
    weight = np.random.default_rng(0).normal(size=(31, 24)).astype(np.float32)
    return write_toy(tmp_path / "bundle", weight)


def test_without_a_gpu_nothing_is_proved(bundle: Bundle) -> None:
    report = gpu_check(Options(bundle=bundle.path))
    assert report.verdict == "unproven" and not report
    assert [step.name for step in report.steps] == NAMES
    assert {step.status for step in report.steps} == {"unproven"}
    assert report.steps[0].text == "there is no driver"


def test_everything_skipped_is_not_a_success(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "gpu.json"
    arguments = ["gpu-check", str(bundle.path), "-o", str(report), "--skip", *NAMES]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "verdict: unproven"
    assert out.count("left out by --skip") == len(NAMES)
    written = json.loads(report.read_text())
    assert written["verdict"] == "unproven" and len(written["steps"]) == len(NAMES)
    assert report.with_suffix(".md").read_text().startswith("# GPU check: unproven\n")
    assert main(arguments) == 2  # the report exists
    assert "pass --force" in capsys.readouterr().err


def test_wrong_options(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--skip speed: steps are driver, provider, selftest"):
        gpu_check(Options(bundle=bundle.path, skip=("speed",)))
    with pytest.raises(UsageError, match=r"ending in \.json"):
        gpu_check(Options(bundle=bundle.path, output=tmp_path / "report.txt"))
    with pytest.raises(UsageError, match=r"--max-tokens: at least 0 .* --batch-size: at least 1"):
        gpu_check(Options(bundle=bundle.path, max_tokens=-1, batch_size=0))
    (tmp_path / "r.md").touch()
    with pytest.raises(OutputError, match=r"r\.md exists"):
        gpu_check(Options(bundle=bundle.path, output=tmp_path / "r.json"))


def _report(bundle: Bundle, *steps: StepRecord) -> GpuReport:
    return command._report(bundle, Options(bundle=bundle.path), steps)


def test_what_is_unproven_comes_first(bundle: Bundle) -> None:
    report = _report(
        bundle,
        StepRecord(name="selftest", status="proved", text="within a|b", seconds=1.25),
        StepRecord(name="latency", status="measured", text="3 ms"),
        StepRecord(name="cuda-graph", status="unproven", text="caches grow"),
    )
    assert report.verdict == "passed"
    lines = render_terminal(report).splitlines()
    assert lines[0].startswith("unproven  cuda-graph") and lines[-1] == "verdict: passed"
    page = render_markdown(report)
    assert page.index("Unproven (1 of 3 steps)") < page.index("| selftest | proved")
    assert "within a\\|b | 1.2 |" in page
    assert "use_tf32=0" in page and "operators on the CPU refused" in page


def test_the_report_is_written_after_each_step(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "gpu.json"

    def crash(context: object) -> None:
        found = json.loads(output.read_text())
        assert [step["name"] for step in found["steps"]] == NAMES[:1]
        raise KeyboardInterrupt

    steps = (STEPS[0], command.Step("crash", "", crash))  # type: ignore[arg-type]
    monkeypatch.setattr(command, "STEPS", steps)
    with pytest.raises(KeyboardInterrupt):
        gpu_check(Options(bundle=bundle.path, output=output))
    assert json.loads(output.read_text())["verdict"] == "unproven"
