"""The command line end to end; wrong input gets one line, exit 2, and nothing is written."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headport import __version__
from headport.cli import COMMANDS, main
from tests.conftest import TEXTS


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of a few documents."""
    file = tmp_path_factory.mktemp("text") / "sample.txt"
    file.write_text("\n\n".join(TEXTS * 6), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def built(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An INT8 bundle made by `headport build` with the recipe we ship."""
    recipe = Path(__file__).parent.parent / "examples" / "recipes" / "int8.toml"
    output = tmp_path_factory.mktemp("built") / "bundle"
    line = ["build", str(tiny_llama), "--recipe", str(recipe), "-o", str(output), "--quiet"]
    assert main(line) == 0
    assert [p.name for p in output.parent.iterdir()] == ["bundle"]
    return output


def test_a_built_bundle_names_its_stages_and_passes_its_selftest(
    built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(built), "--selftest", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [s["stage"] for s in found["provenance"]["stages"]] == ["export", "quantize", "lower"]
    assert found["target"] == "ort-cpu"
    assert found["heads"]["lm"]["quantization"]["format"] == "int8"
    assert found["selftest"]["passed"]


def test_a_built_bundle_can_be_validated(
    built: Path, tiny_llama: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Gates are judged elsewhere; random weights have near-flat answers that no default fits.
    gates = tmp_path / "gates.toml"
    gates.write_text('[[gate]]\nmetric = "kl_mean"\nmax = 1.0\n')
    line = ["validate", str(built), "--reference", str(tiny_llama), "--text", str(text)]
    report = tmp_path / "report.json"
    code = main([*line, "--gates", str(gates), "--json", str(report)])
    assert code == 0, capsys.readouterr()
    assert json.loads(report.read_text())["verdict"] == "passed"
    gates.write_text('[[gate]]\nmetric = "kl_mean"\nmax = 0.0\n')
    assert main([*line, "--gates", str(gates), "--quiet"]) == 1


def test_a_built_bundle_generates(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", str(built), "-p", "The head", "--max-new-tokens", "8"]
    assert main(line) == 0
    streamed = capsys.readouterr().out
    assert main([*line, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.dumps(found)  # a document, and nothing else on stdout
    assert streamed.strip()


_WRONG = {
    "missing checkpoint": ("export none -o out", "none"),
    "missing bundle": ("inspect none", "none"),
    "missing recipe": ("build {llama} --recipe none.toml -o out", "none.toml"),
    "missing text": ("validate {built} --reference {llama} --text none.txt", "none.txt"),
    "empty text": ("validate {built} --reference {llama} --text {empty}", "empty.txt"),
    "missing reference": ("validate {built} --reference none --text {text}", "none"),
    "output exists": ("export {llama} -o {built}", "--force"),
    "quantising a lowered bundle": ("quantize {built} -o out --head int8", "lowered"),
    "lowering twice": ("lower {built} -o out --target ort-cpu", "lowered"),
    "prompt too long": ("generate {built} -p {long}", "context"),
    "empty prompt": ("generate {built} -p=", "prompt"),
}


@pytest.mark.parametrize("name", _WRONG)
def test_wrong_input_is_one_line_exit_2_and_nothing_written(
    name: str,
    built: Path,
    tiny_llama: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    line, word = _WRONG[name]
    values = {
        "llama": tiny_llama,
        "built": built,
        "text": text,
        "empty": tmp_path / "empty.txt",
        "long": "a_" * 200,
    }
    assert main([part.format(**values) for part in line.split()]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("headport: ")
    assert word in lines[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.txt"]


@pytest.mark.parametrize(
    "line",
    [
        "frobnicate",
        "export",
        "quantize a -o b --head int3",
        "lower a -o b --target gpu",
        "generate",
    ],
)
def test_wrong_options_exit_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(line.split())
    assert error.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_json_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headport import doctor

    monkeypatch.setattr(doctor, "run", lambda options: pytest.fail("the work was done"))
    (tmp_path / "file").touch()
    assert main(["doctor", "--json", str(tmp_path / "file" / "a.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main([verb, "--help"])
    assert error.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"headport {__version__}\n"


def test_no_verb_prints_help_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "verbs:" in capsys.readouterr().out


def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    # A verb that would write for a minute, ended from outside.
    script = tmp_path / "verb.py"
    script.write_text(
        "import sys, time, types\n"
        "from pathlib import Path\n"
        "from headport import cli\n"
        "from headport.bundle import draft_bundle\n"
        "from headport.command import OptionRecord\n"
        "class Options(OptionRecord, frozen=True):\n"
        "    'None.'\n"
        "def run(options):\n"
        "    with draft_bundle(Path(sys.argv[1]) / 'out', force=False):\n"
        "        print('writing', flush=True)\n"
        "        time.sleep(60)\n"
        "sys.modules['slow'] = types.SimpleNamespace(SUMMARY='', Options=Options, run=run)\n"
        "cli.COMMANDS['slow'] = ('slow', '')\n"
        "sys.exit(cli.main(['slow']))\n"
    )
    folder = tmp_path / "work"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "writing\n"
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        assert "SIGTERM; no output was written" in process.stderr.read()
    assert list(folder.iterdir()) == []
