"""The reference of heads without its process, and a comparison with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headport.validate.heads.command import HeadsReport, Options, validate_heads_with
from headport.validate.heads.reference import HeadsReference
from headport.validate.wire import AskHeads

__all__ = ["Local", "compared_with"]


class Local:
    """A reference without its process."""

    def __init__(self, inner: HeadsReference) -> None:
        self.inner = inner
        self._asked: list[AskHeads] = []

    def ready(self) -> Any:
        return self.inner.ready

    def encode(self, texts: Any) -> Any:
        return tuple(tuple(self.inner.tokenizer(text)["input_ids"]) for text in texts)

    def encode_chats(self, chats: Any) -> Any:
        raise AssertionError("conversations are refused before")

    def ask_heads(self, token_ids: Any) -> None:
        self._asked.append(AskHeads(tuple(token_ids.tolist())))

    def read_heads(self) -> Any:
        announced, arrays = self.inner.ask(self._asked.pop(0))
        found: dict[str, Any] = {}
        for (head, name, shape), array in zip(announced.arrays, arrays, strict=True):
            assert array.shape == shape
            found.setdefault(head, {})[name] = array
        return found


def compared_with(model: Path, bundle: Path, folder: Path, *specs: str) -> HeadsReport:
    """Compare a bundle with its checkpoint, and heads that export was given, on two texts."""
    lines = [{"text": "The head is the last matrix."}, {"text": "It has a row per token."}]
    file = folder / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    reference = Local(HeadsReference(str(model), *(f"--head={spec}" for spec in specs)))
    return validate_heads_with(reference, Options(bundle=bundle, reference="", text=(file,)))
