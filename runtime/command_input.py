"""What `headport generate` is to go on from: a prompt, a chat message, or a source."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headport.errors import UsageError
from headport.runtime.generator import Generator
from headport.runtime.inputs import Input

__all__ = ["InputOptions", "read_input"]


class InputOptions(Protocol):
    """The options that say it."""

    @property
    def bundle(self) -> Path: ...
    @property
    def prompt(self) -> str | None: ...
    @property
    def chat(self) -> bool: ...
    @property
    def source(self) -> str | None: ...
    @property
    def features(self) -> Path | None: ...


def read_input(options: InputOptions, generator: Generator) -> tuple[Input, str | None]:
    """A generator's input, and what the reply begins with.

    Raises:
        UsageError: If the options do not go together or not with the bundle, or the file of
            features cannot be read.
    """
    declared = generator.bundle.manifest.source
    given = [f"--{name}" for name in ("source", "features") if getattr(options, name) is not None]
    if declared is None:
        if given:
            raise UsageError(
                f"{options.bundle} is of a decoder-only model and reads no source; give the text "
                f"to continue with -p instead of {' and '.join(given)}"
            )
        if options.prompt is None:
            raise UsageError("nothing to continue: give a text with -p")
        if options.chat:
            return generator.chat_ids([{"role": "user", "content": options.prompt}]), None
        return options.prompt, None
    wanted = "--features" if declared.vocab_size is None else "--source"
    if given != [wanted]:
        raise UsageError(
            f"{options.bundle} is of an encoder-decoder model: {wanted} was expected, "
            f"{' and '.join(given) or 'none'} was given; -p says what the reply begins with"
        )
    if options.chat:
        raise UsageError("--chat is for decoder-only models; leave it out")
    if options.features is None:
        assert options.source is not None
        return options.source, options.prompt
    return _read_features(options.features), options.prompt


def _read_features(path: Path) -> npt.NDArray[Any]:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"--features {path}: no array in NumPy's format ({error})") from error
    if not isinstance(found, np.ndarray):
        raise UsageError(f"--features {path}: one array was expected, an archive was found")
    return found
