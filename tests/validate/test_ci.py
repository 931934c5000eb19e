"""The pytest plugin and the examples for pipelines, run against a real bundle."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import msgspec
import pytest
import yaml

from headport.validate import recording
from tests.validate.reports import report

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "ci"
STRICT = "[[gate]]\nmetric = 'perplexity_ratio'\nmax = 0.5\nby = 'value'\n"


@pytest.fixture(scope="module")
def stored(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored reference: pipelines need neither torch nor the checkpoint."""
    folder = tmp_path_factory.mktemp("stored")
    text = folder / "prose.txt"
    text.write_text("The head turns a state into logits. " * 9 + "\n\n" + "Rounding moves. " * 30)
    options = recording.Options(
        model=str(tiny_llama), text=(text,), output=folder / "ref", max_tokens=120
    )
    recording.record(options)
    return folder / "ref"


def environment(**more: Any) -> dict[str, str]:
    # The commands of this environment come first, as after an installation.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return found | {key: str(value) for key, value in more.items()}


def run_pytest(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["-p", "headport.validate.pytest_plugin", "--rootdir", str(folder), "-c"]
    (folder / "pytest.ini").touch()
    return subprocess.run(
        [*command, str(folder / "pytest.ini"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD=1),
    )


def test_the_example_tests_pass_on_a_good_bundle(
    tiny_bundle: Path, stored: Path, tmp_path: Path
) -> None:
    settings = f"headport_reference = {stored}\nheadport_max_tokens = 0"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{settings}\n")
    found = run_pytest(tmp_path, EXAMPLES / "test_release.py", "--headport-bundle", tiny_bundle)
    assert found.returncode == 0 and "3 passed" in found.stdout, found.stdout
    assert f"headport: bundle {tiny_bundle}, {stored}" in found.stdout


GATED = """
import pytest

def test_all(assert_gates):
    assert_gates({file!r})

def test_one_text(assert_gates):
    assert_gates({file!r}, slice="prose")

def test_no_such_text(assert_gates):
    assert_gates({file!r}, slice="poetry")
"""


def test_a_failed_gate_fails_the_test_with_its_reason(tmp_path: Path) -> None:
    gate = report().gates[0]
    failed = msgspec.structs.replace(gate, verdict="failed", value=9e-3)
    passed = msgspec.structs.replace(gate, slice="prose")
    file = tmp_path / "report.json"
    file.write_bytes(msgspec.json.encode(report(verdict="failed", gates=(failed, passed))))
    (tmp_path / "test_it.py").write_text(GATED.format(file=str(file)))
    found = run_pytest(tmp_path, "test_it.py")
    assert found.returncode == 1 and "2 failed, 1 passed" in found.stdout
    assert "all texts: failed: kl_mean 9.000e-03" in found.stdout
    assert "Do not ship this bundle" in found.stdout
    assert "no gate holds the text 'poetry': nothing would be tested" in found.stdout
    assert "Traceback" not in found.stdout and "pytest_plugin.py" not in found.stdout


def test_a_gate_without_a_bundle_fails_and_does_not_skip(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(headport_bundle): pass\n")
    found = run_pytest(tmp_path, "test_it.py")
    assert found.returncode == 1 and "--headport-bundle was expected" in found.stdout
    broken = run_pytest(tmp_path, "test_it.py", "--headport-bundle", tmp_path)
    assert broken.returncode == 1 and "headport: " in broken.stdout


def test_the_plugin_is_published_and_light() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = project["entry-points"]["pytest11"]["headport"]
    assert hasattr(import_module(name), "assert_gates")
    code = f"import sys, {name}; print(sorted(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    heavy = ("numpy", "msgspec", "torch", "onnxruntime", "tokenizers", "tqdm")
    assert not [name for name in heavy if f"'{name}'" in found.stdout]


def steps_of(action: dict[str, Any], inputs: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
    """The shell steps that run with these inputs, and the variables of each."""
    given = {name: inputs.get(name, i.get("default")) for name, i in action["inputs"].items()}
    assert not [n for n, i in action["inputs"].items() if i.get("required") and given[n] is None]
    found = []
    for step in action["runs"]["steps"]:
        condition = step.get("if", "${{ always() }}")
        if condition == "${{ inputs.install != '' }}" and not given["install"]:
            continue
        assert condition in ("${{ always() }}", "${{ inputs.install != '' }}")
        if "run" in step:
            assert step["shell"] == "bash" and "${{" not in step["run"]
            variables = {
                key: given[value.removeprefix("${{ inputs.").removesuffix(" }}")]
                for key, value in step["env"].items()
            }
            found.append((step["run"], variables))
    return found


def shell(script: str, folder: Path, **variables: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment(**variables),
    )


def test_the_composite_action_runs(tiny_bundle: Path, stored: Path, tmp_path: Path) -> None:
    action = yaml.safe_load((EXAMPLES / "action.yml").read_text())
    inputs = {"bundle": str(tiny_bundle), "reference": str(stored), "install": ""}
    ((script, variables),) = steps_of(action, inputs)
    summary, output = tmp_path / "summary.md", tmp_path / "output"
    found = shell(
        script,
        tmp_path,
        GITHUB_STEP_SUMMARY=summary,
        GITHUB_OUTPUT=output,
        GITHUB_ACTION_PATH=EXAMPLES,
        **variables,
    )
    assert found.returncode == 0, found.stderr
    assert output.read_text() == "report=headport-report/report.html\n"
    assert summary.read_text(encoding="utf-8").startswith("# Validation: passed")
    written = {p.name for p in (tmp_path / "headport-report").iterdir()}
    assert written == {"report.json", "report.html", "report.md", "junit.xml"}


def test_the_gitlab_job_fails_with_its_gate(
    tiny_bundle: Path, stored: Path, tmp_path: Path
) -> None:
    job = yaml.safe_load((EXAMPLES / "gitlab-ci.yml").read_text())["headport"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "strict.toml").write_text(STRICT)
    variables = job["variables"] | {"BUNDLE": tiny_bundle, "REFERENCE": stored}
    found = shell("\n".join(job["script"]), tmp_path, GATES="strict.toml", **variables)
    assert found.returncode == 1, found.stderr
    suite = ET.parse(tmp_path / job["artifacts"]["reports"]["junit"]).getroot()[0]
    assert suite.get("failures") == "1"
    assert (tmp_path / "headport-report" / "report.html").exists()


def test_the_local_hook_runs_the_same_script(tmp_path: Path) -> None:
    (repository,) = yaml.safe_load((EXAMPLES / "pre-commit.yaml").read_text())["repos"]
    (hook,) = repository["hooks"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    found = shell(hook["entry"], tmp_path)
    assert found.returncode == 2 and found.stderr.startswith("headport: "), "nothing is there"
    assert "a bundle folder is expected" in shell("examples/ci/check.sh", tmp_path).stderr
