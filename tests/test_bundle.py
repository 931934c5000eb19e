"""A bundle opens only if it is whole, and appears only if it is complete."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from headport.bundle import (
    Bundle,
    check_text_files,
    check_writable,
    draft_bundle,
    refuse_overlap,
    write_text,
)
from headport.errors import BundleError, OutputError, UsageError
from tests.bundles import FILES, manifest, write_bundle


def _edit(path: Path, **changes: object) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_written_bundle_opens_from_a_moved_copy_and_another_cwd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_bundle(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "moved")
    monkeypatch.chdir("/")
    found = Bundle.open(tmp_path / "moved")
    assert found.manifest == written.manifest
    assert set(found.manifest.files) == set(FILES)
    assert found.unlisted_files() == []


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_bundle(tmp_path / name)
    for name in (*FILES, "manifest.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def _flip(path: Path) -> None:
    (path / "data/shared.bin").write_bytes(b"\1\2\3\5")


def _cut(path: Path) -> None:
    (path / "data/shared.bin").write_bytes(b"\1\2")


def _remove(path: Path) -> None:
    (path / "head.lm.onnx").unlink()


def _link_file(path: Path) -> None:
    (path / "head.lm.onnx").rename(path.parent / "elsewhere")
    (path / "head.lm.onnx").symlink_to(path.parent / "elsewhere")


def _link_folder(path: Path) -> None:
    (path / "data").rename(path.parent / "elsewhere")
    (path / "data").symlink_to(path.parent / "elsewhere")


def _absolute(path: Path) -> None:
    _edit(path, files={"/etc/hostname": {"sha256": "0", "bytes": 1}})


def _dots(path: Path) -> None:
    _edit(path, files={"data/../../x": {"sha256": "0", "bytes": 1}})


def _unlisted(path: Path) -> None:
    _edit(path, files={})


def _schema(path: Path) -> None:
    _edit(path, schema_version=99)


def _unknown_field(path: Path) -> None:
    _edit(path, surprise=1)


def _not_json(path: Path) -> None:
    (path / "manifest.json").write_text("{")


def _no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip, r"data/shared.bin: changed \(its sha256"),
        (_cut, r"data/shared.bin: changed \(4 bytes expected, 2 found\)"),
        (_remove, r"head.lm.onnx: missing"),
        (_link_file, r"head.lm.onnx: a symbolic link"),
        (_link_folder, r"data: a symbolic link"),
        (_absolute, r"/etc/hostname: an absolute path"),
        (_dots, r"data/../../x: leads out of the bundle"),
        (_unlisted, r"backbone.onnx: used by a graph but not listed"),
        (_schema, r"schema version 1 expected, 99 found"),
        (_unknown_field, r"surprise"),
        (_not_json, r"not a headport manifest"),
        (_no_manifest, r"no manifest.json in it"),
        (shutil.rmtree, r"nothing is there"),
    ],
)
def test_each_damage_has_its_own_message(tmp_path: Path, damage, message: str) -> None:
    write_bundle(tmp_path / "a")
    Bundle.open(tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(BundleError, match=message):
        Bundle.open(tmp_path / "a")


def test_without_verification_only_presence_and_size_are_checked(tmp_path: Path) -> None:
    write_bundle(tmp_path / "a")
    _flip(tmp_path / "a")
    Bundle.open(tmp_path / "a", verify=False)
    _cut(tmp_path / "a")
    with pytest.raises(BundleError, match="2 found"):
        Bundle.open(tmp_path / "a", verify=False)


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    write_bundle(tmp_path / "a")
    _remove(tmp_path / "a")
    _flip(tmp_path / "a")
    with pytest.raises(BundleError, match=r"(?s)shared\.bin.*head\.lm|head\.lm.*shared\.bin"):
        Bundle.open(tmp_path / "a")


def test_an_abandoned_draft_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), draft_bundle(tmp_path / "a", force=False) as draft:
        (draft.path / "x").write_bytes(b"x")
        draft.preview(manifest())
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_preview_moves_the_draft(tmp_path: Path) -> None:
    with draft_bundle(tmp_path / "a", force=False) as draft:
        before = draft.path
        preview = draft.preview(manifest())
        assert preview.path != before
        assert not before.exists()


def test_existing_output_needs_force_and_force_replaces_only_bundles(tmp_path: Path) -> None:
    write_bundle(tmp_path / "a")
    with pytest.raises(OutputError, match="--force"):
        write_bundle(tmp_path / "a")
    write_bundle(tmp_path / "a", force=True, defaults={"max_new_tokens": 7})
    assert Bundle.open(tmp_path / "a").manifest.defaults == {"max_new_tokens": 7}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    (tmp_path / "precious").mkdir()
    with pytest.raises(OutputError, match="not a bundle"):
        write_bundle(tmp_path / "precious", force=True)


def test_a_failed_replacement_keeps_the_old_bundle(tmp_path: Path) -> None:
    write_bundle(tmp_path / "a", defaults={"max_new_tokens": 1})
    with pytest.raises(ZeroDivisionError), draft_bundle(tmp_path / "a", force=True):
        _ = 1 / 0
    assert Bundle.open(tmp_path / "a").manifest.defaults == {"max_new_tokens": 1}


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="no space left"),
        draft_bundle(tmp_path / "a", force=False),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_hold_files_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(OutputError, match="cannot be written"),
        draft_bundle(tmp_path / "file" / "a", force=False),
    ):
        pass


def test_text_files_are_not_overwritten_without_force(tmp_path: Path) -> None:
    file = tmp_path / "new" / "report.md"
    write_text({file: "one"}, force=False)
    with pytest.raises(OutputError, match="exists"):
        write_text({file: "two", tmp_path / "other": "x"}, force=False)
    assert file.read_text() == "one"
    assert not (tmp_path / "other").exists()
    write_text({file: "two"}, force=True)
    assert file.read_text() == "two"


def test_a_device_or_pipe_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text({pipe: "one"}, force=True)
        assert os.read(reader, 16) == b"one"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_a_report_that_cannot_be_written_leaves_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        write_text({tmp_path / "folder": "one"}, force=True)
    assert list(tmp_path.rglob("*")) == [tmp_path / "folder"]


@pytest.mark.parametrize("place", ["file/report.json", "folder", "/proc/none/report.json"])
def test_what_cannot_be_written_is_known_beforehand(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=r"folder|cannot be written"):
        check_writable(tmp_path / place)


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    for place in ("old.json", "new.json", "a/b/new.json"):
        check_writable(tmp_path / place)
    check_writable(Path(os.devnull))
    assert [p.name for p in tmp_path.iterdir()] == ["old.json"]


def test_text_files_are_checked_before_the_work(tmp_path: Path) -> None:
    there, new = tmp_path / "there.md", tmp_path / "new.md"
    there.write_text("old")
    check_text_files([new, None], force=False)
    check_text_files([there, new], force=True)
    with pytest.raises(OutputError, match="exists; choose another output or pass --force"):
        check_text_files([new, there], force=False)
    with pytest.raises(UsageError, match="was given 2 times"):
        check_text_files([new, None, new], force=True)
    with pytest.raises(OutputError, match="is a folder"):
        check_text_files([tmp_path], force=True)


def test_a_bundle_without_a_backbone_says_so() -> None:
    graphs = {name: g for name, g in manifest().graphs.items() if g.role != "backbone"}
    with pytest.raises(BundleError, match="one of role backbone was expected"):
        _ = manifest(graphs=graphs).backbone


def test_an_output_never_overlaps_its_input(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    refuse_overlap(source, tmp_path / "out")
    refuse_overlap(source, tmp_path / "in-2")
    for output in (source, source / "sub", tmp_path, source / ".." / "in"):
        with pytest.raises(OutputError, match="contains or lies in the input"):
            refuse_overlap(source, output)
