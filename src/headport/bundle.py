"""The bundle: the folder that is shipped. Opened with checks, written complete or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from headport.errors import BundleError, OutputError, UsageError
from headport.manifest import FileEntry, Manifest, decode_manifest, encode_manifest

__all__ = [
    "MANIFEST",
    "SELFTEST_FILE",
    "Bundle",
    "Draft",
    "carried_files",
    "check_output",
    "check_text_files",
    "check_writable",
    "copy_files",
    "draft_bundle",
    "file_entry",
    "refuse_overlap",
    "write_text",
]

MANIFEST = "manifest.json"
SELFTEST_FILE = "selftest.safetensors"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk. Holds no open file; `path` may be moved between uses."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Bundle:
        """Open a bundle and check it.

        Args:
            path: The bundle's folder.
            verify: Compare every file's sha256; False checks only presence and size.

        Raises:
            BundleError: If the folder is no bundle, its schema version is unknown, a file is
                missing, changed, a symbolic link, or lies outside the bundle.
        """
        folder = Path(path)
        file = folder / MANIFEST
        if not folder.is_dir():
            raise BundleError(f"{folder}: a bundle folder was expected, nothing is there")
        if not file.is_file():
            raise BundleError(f"{folder}: no {MANIFEST} in it, so it is not a headport bundle")
        bundle = cls(folder, decode_manifest(file.read_bytes(), str(file)))
        bundle.check(verify=verify)
        return bundle

    def require_decoder_only(self, what: str, instead: str) -> None:
        """Refuse a bundle that answers to a source, where nothing is there to give it one.

        Args:
            what: What was asked for, in words.
            instead: What to do.

        Raises:
            UsageError: If it is of an encoder-decoder model.
        """
        if self.manifest.source is not None:
            raise UsageError(
                f"{self.path} is the bundle of an encoder-decoder model "
                f"({self.manifest.model.architecture}), {what} was asked for, which is not "
                f"supported for those; {instead}"
            )

    def require_no_prefix(self, what: str, instead: str) -> None:
        """Refuse a bundle with a learnt prefix, where nothing would put it into the caches.

        Args:
            what: What was asked for, in words.
            instead: What to do.

        Raises:
            UsageError: If it has one.
        """
        prefix = self.manifest.prefix
        if prefix is not None:
            raise UsageError(
                f"{self.path} begins every sequence with {prefix.tokens} learnt tokens "
                f"({prefix.kind}), {what} was asked for, which would answer without them; {instead}"
            )

    def file(self, name: str) -> Path:
        """The path of a file that the manifest lists.

        Raises:
            BundleError: If the manifest does not list it.
        """
        if name not in self.manifest.files:
            raise BundleError(f"{self.path}: the manifest lists no file {name!r}")
        return self.path / name

    def check(self, *, verify: bool) -> None:
        """Raise `BundleError` naming every file that is missing, changed or out of bounds."""
        entries = self.manifest.files
        # Bounds first: a path that leaves the bundle must not even be looked at.
        faults = [fault for name in entries if (fault := _out_of_bounds(self.path, name))]
        if not faults:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                found = pool.map(
                    lambda item: _fault(self.path / item[0], item[0], item[1], verify),
                    entries.items(),
                )
                faults = [fault for fault in found if fault]
        named = [graph.file for graph in self.manifest.graphs.values()]
        named += [tensor.file for tensor in self.manifest.tensors]
        unlisted = sorted({name for name in named if name not in entries})
        faults += [f"{name}: used by a graph but not listed in `files`" for name in unlisted]
        if faults:
            raise BundleError(f"{self.path} is damaged: " + "; ".join(faults))

    def unlisted_files(self) -> list[str]:
        """Files in the folder that the manifest does not know, sorted."""
        found = (p for p in self.path.rglob("*") if p.is_file() or p.is_symlink())
        names = (p.relative_to(self.path).as_posix() for p in found)
        return sorted(n for n in names if n != MANIFEST and n not in self.manifest.files)


def _out_of_bounds(root: Path, name: str) -> str | None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or Path(name).is_absolute():
        return f"{name}: an absolute path; only files inside the bundle are allowed"
    if ".." in pure.parts:
        return f"{name}: leads out of the bundle with '..'"
    for part in (*pure.parents, pure):
        if part != PurePosixPath(".") and (root / part).is_symlink():
            return f"{part}: a symbolic link; copy the real file into the bundle"
    return None


def _fault(path: Path, name: str, entry: FileEntry, verify: bool) -> str | None:
    if not path.is_file():
        return f"{name}: missing"
    size = path.stat().st_size
    if size != entry.bytes:
        return f"{name}: changed ({entry.bytes} bytes expected, {size} found)"
    if verify and file_entry(path).sha256 != entry.sha256:
        return f"{name}: changed (its sha256 is not the manifest's)"
    return None


def file_entry(path: Path) -> FileEntry:
    """Size and sha256 of a file, read in chunks."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(sha256=digest.hexdigest(), bytes=size)


class Draft:
    """A folder in the making: a temporary one that becomes the output in one rename."""

    def __init__(self, path: Path, output: Path, force: bool) -> None:
        self.path = path  # moves once, when `preview` is called
        self.output = output
        self._force = force

    def preview(self, manifest: Manifest) -> Bundle:
        """The draft as an unsealed bundle, moved first, so that checks run on a moved copy."""
        self.move()
        return Bundle(self.path, _with_files(self.path, manifest))

    def move(self) -> None:
        """Rename the folder, so that what only works at its first place is noticed."""
        moved = self.path.with_name(self.path.name + ".moved")
        self.path.rename(moved)
        self.path = moved

    def commit(self, manifest: Manifest) -> Bundle:
        """Write the manifest with every file's checksum and rename the folder into place."""
        sealed = _with_files(self.path, manifest)
        (self.path / MANIFEST).write_bytes(encode_manifest(sealed))
        Bundle.open(self.path, verify=False)
        self.place()
        return Bundle(self.output, sealed)

    def place(self) -> None:
        """Rename the folder into its place, in exchange for what `force` may replace."""
        replaced = self.output.with_name(f".{self.output.name}.replaced.{os.getpid()}")
        if self._force and self.output.exists():
            self.output.rename(replaced)
        try:
            self.path.rename(self.output)
        except OSError:
            if replaced.exists():
                replaced.rename(self.output)
            raise
        shutil.rmtree(replaced, ignore_errors=True)


def _with_files(folder: Path, manifest: Manifest) -> Manifest:
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        entries = list(pool.map(file_entry, paths))
    names = [p.relative_to(folder).as_posix() for p in paths]
    return msgspec.structs.replace(manifest, files=dict(zip(names, entries, strict=True)))


def check_output(output: str | Path, *, force: bool, marker: str = MANIFEST) -> None:
    """Refuse an output that exists, or that `force` must not replace, before any work is done.

    Args:
        output: The folder to be written.
        force: Replace one of the same kind.
        marker: The file that tells this kind of folder: a bundle's manifest.

    Raises:
        OutputError: If `output` exists and `force` is False, or it holds no `marker`.
    """
    target = Path(output)
    if target.exists() or target.is_symlink():
        if not force:
            raise OutputError(f"{output} exists; choose another output or pass --force")
        if target.is_symlink() or not (target / marker).is_file():
            kind = "a bundle" if marker == MANIFEST else f"a folder with a {marker}"
            raise OutputError(f"{output} is not {kind}, so --force does not replace it")


def refuse_overlap(source: str | Path, output: str | Path) -> None:
    """Refuse an output that is its own input, lies in it or holds it: inputs are never changed.

    Raises:
        OutputError: If one of the two folders is the other or contains it.
    """
    inner, outer = Path(source).resolve(), Path(output).resolve()
    if inner == outer or inner in outer.parents or outer in inner.parents:
        raise OutputError(
            f"{output} is, contains or lies in the input {source}; choose another output"
        )


@contextmanager
def draft_bundle(output: str | Path, *, force: bool, marker: str = MANIFEST) -> Iterator[Draft]:
    """Open a draft beside `output`; whatever happens, a draft that was not committed disappears.

    Args:
        output: The folder to be written.
        force: Replace one of the same kind.
        marker: The file that tells this kind of folder: a bundle's manifest.

    Raises:
        OutputError: If `output` exists and `force` is False, if `force` would replace something
            of another kind, or if the disk is full or not writable.
    """
    check_output(output, force=force, marker=marker)
    target = Path(output).absolute()
    draft: Draft | None = None
    try:
        draft = Draft(_scratch_folder(target), target, force)
        yield draft
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(f"no space left to write {output}; nothing was written") from error
        raise
    finally:
        if draft is not None:
            shutil.rmtree(draft.path, ignore_errors=True)


def carried_files(manifest: Manifest) -> list[str]:
    """Files that a stage hands on as they are: all but graphs, their tensors and the self-test."""
    made = {graph.file for graph in manifest.graphs.values()}
    made |= {tensor.file for tensor in manifest.tensors} | {SELFTEST_FILE}
    return [name for name in manifest.files if name not in made]


def _scratch_folder(target: Path) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.draft.", dir=target.parent))
        folder.chmod(0o755)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OutputError(f"{target} cannot be written: {error.strerror}") from error
    return folder


def copy_files(source: Path, names: Iterable[str], folder: Path) -> None:
    """Copy files by relative name, keeping their place."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold.

    Raises:
        OutputError: If it is a folder, lies below a file, or its folder takes no new file.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder; a file to write was expected")
    if path.exists() and not path.is_file():  # a device or a pipe
        return
    folder = next(place for place in path.absolute().parents if place.exists())
    try:
        # Permissions alone do not tell: a file system may be read-only, or hold no files at all.
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error


def check_text_files(paths: Iterable[Path | None], *, force: bool) -> None:
    """Refuse files that cannot be written, before the work whose results they are to hold.

    Args:
        paths: One per result; None where it is not wanted.
        force: Existing files may be replaced.

    Raises:
        UsageError: If a file is named twice.
        OutputError: If one exists and `force` is False, or cannot be written.
    """
    given = [path for path in paths if path is not None]
    for path, times in Counter(given).items():
        if times > 1:
            raise UsageError(f"{path} was given {times} times; give each output its own file")
        if path.exists() and not force:
            raise OutputError(f"{path} exists; choose another output or pass --force")
        check_writable(path)


def write_text(files: Mapping[Path, str], *, force: bool) -> None:
    """Write text files, each complete or not at all; used for reports.

    Raises:
        OutputError: If one exists and `force` is False, or cannot be written.
    """
    for path in files:
        if path.is_file() and not force:
            raise OutputError(f"{path} exists; choose another output or pass --force")
    for path, text in files.items():
        try:
            _write_whole(path, text)
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}") from error


def _write_whole(path: Path, text: str) -> None:
    if path.exists() and not path.is_file():
        # A device or a pipe is written to; renaming a file over it would destroy it.
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
