"""Models are written all or none, beside each other, version by version."""

from __future__ import annotations

from pathlib import Path

import pytest

from headport.bundle import MANIFEST
from headport.errors import OutputError
from headport.runtime.triton.repository import ModelFiles, write_models


def model(name: str, text: str = "1", config: str = "config") -> ModelFiles:
    return ModelFiles(name, config, lambda folder: _write(folder / "model.bin", text))


def _write(file: Path, text: str) -> None:
    file.write_text(text)


def _broken(folder: Path) -> None:
    (folder / "model.bin").write_text("half")
    raise RuntimeError("no more")


def files(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def test_models_and_versions_stand_beside_each_other(tmp_path: Path) -> None:
    repository = tmp_path / "deep" / "repository"
    assert write_models(repository, [model("a"), model("b")], 1, force=False) == (
        repository / "a" / "1",
        repository / "b" / "1",
    )
    write_models(repository, [model("a", "2")], 2, force=False)
    assert files(repository) == {
        "a/1/model.bin": "1",
        "a/2/model.bin": "2",
        "a/config.pbtxt": "config",
        "b/1/model.bin": "1",
        "b/config.pbtxt": "config",
    }
    assert [p.name for p in repository.parent.iterdir()] == ["repository"]


def test_a_version_is_replaced_with_force_alone(tmp_path: Path) -> None:
    write_models(tmp_path / "r", [model("a", "old")], 1, force=False)
    with pytest.raises(OutputError, match=r"a/1 exists; choose another --version or pass --force"):
        write_models(tmp_path / "r", [model("a", "new")], 1, force=False)
    write_models(tmp_path / "r", [model("a", "new")], 1, force=True)
    assert files(tmp_path / "r")["a/1/model.bin"] == "new"


def test_a_configuration_holds_for_all_versions(tmp_path: Path) -> None:
    repository = tmp_path / "r"
    write_models(repository, [model("a")], 1, force=False)
    with pytest.raises(
        OutputError, match=r"config\.pbtxt differs .* \(1\); choose another --name$"
    ):
        write_models(repository, [model("a", config="other")], 2, force=False)
    with pytest.raises(OutputError, match=r"a/1 exists"):
        write_models(repository, [model("a", config="other")], 1, force=False)
    write_models(repository, [model("a", "2", config="other")], 1, force=True)
    assert files(repository) == {"a/1/model.bin": "2", "a/config.pbtxt": "other"}
    write_models(repository, [model("a", config="other")], 2, force=False)
    with pytest.raises(OutputError, match=r"differs .* \(1\); choose another --name$"):
        write_models(repository, [model("a", config="third")], 2, force=True)


def test_a_failed_run_leaves_nothing(tmp_path: Path) -> None:
    repository = tmp_path / "deep" / "r"
    with pytest.raises(RuntimeError, match="no more"):
        write_models(repository, [model("a"), ModelFiles("b", "", _broken)], 1, force=False)
    assert not list(tmp_path.iterdir())


def test_a_failed_run_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "r"
    write_models(repository, [model("a", "old"), model("b", "old")], 1, force=False)
    rename = Path.rename

    def fail(source: Path, target: Path) -> Path:
        if target == repository / "b" / "1" and source.name == "1" and "old" not in source.parts:
            raise OSError(5, "Input/output error")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_models(repository, [model("a", "new"), model("b", "new")], 1, force=True)
    monkeypatch.undo()
    assert {text for text in files(repository).values() if text != "config"} == {"old"}
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


def test_a_full_disk(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match=r"no space left to write .*r; nothing was written"):
        write_models(tmp_path / "r", [ModelFiles("a", "", fill)], 1, force=False)
    assert not list(tmp_path.iterdir())


def test_what_is_no_repository(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).touch()
    with pytest.raises(OutputError, match="is not a model repository"):
        write_models(tmp_path, [model("a")], 1, force=False)
    with pytest.raises(OutputError, match="is not a model repository"):
        write_models(tmp_path / MANIFEST, [model("a")], 1, force=False)
    (tmp_path / "r" / "a").mkdir(parents=True)
    with pytest.raises(OutputError, match=r"a holds no config\.pbtxt, so it is not a model"):
        write_models(tmp_path / "r", [model("a")], 1, force=True)
