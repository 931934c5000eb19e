"""Hidden states of texts, and the token that follows each, collected once and kept on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import UsageError
from headport.progress import track
from headport.runner import open_runner
from headport.runtime.text import Tokens
from headport.session import SessionSettings

__all__ = ["States", "collect_states", "read_ids", "text_windows"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

WINDOW = 512  # tokens that see each other
_PART = 1024
_CONTEXT = 24  # tokens shown before one
_CHARACTERS = (
    16  # of a long text are read for each token that is wanted, and more if they fall short
)
_MARGIN = 64  # tokens before a cut that are not used


@dataclass(frozen=True)
class States:
    """Hidden states after the final norm, mapped from disk, and the next token of each."""

    states: Float32  # [N, H]
    targets: Int64  # [N]
    ids: Int64  # the token of each position, [N]
    starts: Int64  # the first position of each position's window, [N]
    tokens: Tokens

    def context(self, position: int) -> str:
        """The token that follows a position, behind the end of what comes before it."""
        first = max(int(self.starts[position]), position - _CONTEXT + 1)
        before = self.tokens.decode(self.ids[first : position + 1].tolist())
        return f"{before[-40:]!r} → {self.tokens.decode([int(self.targets[position])])!r}"

    def parts(self) -> Iterator[Float32]:
        """States a few at a time."""
        for start in range(0, len(self.states), _PART):
            yield np.asarray(self.states[start : start + _PART])


def collect_states(
    bundle: Bundle,
    files: Sequence[Path],
    folder: Path,
    limit: int | None = None,
    settings: SessionSettings | None = None,
) -> States:
    """Run a bundle's backbone over texts, in windows of `WINDOW` tokens.

    Args:
        bundle: Any target.
        files: UTF-8 text files, one document each, tokenised as the tokenizer itself does it.
        folder: An existing folder; the arrays are written into it as they come.
        limit: At most this many positions, shared out evenly among the files.
        settings: Session settings.

    Raises:
        UsageError: If a file cannot be read or gives fewer than two tokens.
    """
    tokens = Tokens(bundle)
    runner = open_runner(bundle, settings, heads=())
    windows = [w for ids in _read_ids(tokens, files, limit) for w in text_windows(ids)]
    count = sum(len(window) - 1 for window in windows)
    H = bundle.manifest.model.hidden_size
    states = np.lib.format.open_memmap(folder / "states.npy", "w+", np.float32, (count, H))
    targets = np.empty(count, np.int64)
    done = 0
    for window in track(windows, "hidden states", unit="window"):
        length = len(window) - 1
        cache = runner.new_cache(1, length)
        found = runner.forward(cache, window[None, :-1], np.array([length]))
        states[done : done + length] = found[0]
        targets[done : done + length] = window[1:]
        done += length
    states.flush()
    ids = np.concatenate([window[:-1] for window in windows])
    lengths = np.array([len(window) - 1 for window in windows])
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return States(states, targets, ids, starts, tokens)


def read_ids(bundle: Bundle, files: Sequence[Path], limit: int | None = None) -> list[Int64]:
    """Token ids of each text, one more than positions are wanted of it.

    Args:
        bundle: Whose tokenizer is used.
        files: As for `collect_states`.
        limit: As for `collect_states`.

    Raises:
        UsageError: If a file cannot be read or gives fewer than two tokens.
    """
    return _read_ids(Tokens(bundle), files, limit)


def text_windows(ids: Int64) -> list[Int64]:
    """The ids [N + 1] of a text in parts of `WINDOW` positions and the token that follows them."""
    return [ids[start : start + WINDOW + 1] for start in range(0, len(ids) - 1, WINDOW)]


def _read_ids(tokens: Tokens, files: Sequence[Path], limit: int | None) -> list[Int64]:
    if limit is not None and limit < len(files):
        raise UsageError(f"{limit} tokens of {len(files)} texts: at least one of each was expected")
    share = None if limit is None else -(-limit // len(files))
    found = []
    for file in files:
        ids = np.array(_leading_ids(tokens, file, share), np.int64)
        if len(ids) < 2:
            raise UsageError(f"{file}: text of two tokens or more was expected, {len(ids)} found")
        found.append(ids[: None if share is None else share + 1])
    return found


def _leading_ids(tokens: Tokens, file: Path, share: int | None) -> list[int]:
    """Ids of a text, of a long one only as much of it as is needed for `share` positions."""
    count = None if share is None else _CHARACTERS * (share + 1)
    try:
        while True:
            with file.open(encoding="utf-8") as stream:
                text = stream.read() if count is None else stream.read(count)
                whole = not stream.read(1)
            ids = tokens.encode(text)
            # What lies at a cut may be tokenised otherwise than the whole text would be.
            if whole or share is None:
                return ids
            if len(ids) > share + _MARGIN:
                return ids[: share + 1]
            assert count is not None
            count *= 2
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8 text: {error.reason}") from error
