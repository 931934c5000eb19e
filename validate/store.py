"""A stored reference: its hidden states and its head, from which logits are computed again.

`headport reference` writes the folder; validation reads it with NumPy alone, so that a machine
without torch and without the checkpoint can judge a bundle. A position takes H numbers, not V; or
2 K, where only the K likeliest tokens are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from headport.bundle import file_entry
from headport.errors import ParityError, UsageError
from headport.manifest import FileEntry
from headport.validate.documents import Text
from headport.validate.evidence import NoiseFloor
from headport.validate.given_source import GivenSource
from headport.validate.records import Messages
from headport.validate.reference_process import ScoredBlock
from headport.validate.top_rows import TopRows
from headport.validate.wire import Continued, Draw, Drawn, Lensed, Ready

__all__ = [
    "HEAD_FILE",
    "HIDDEN_FILE",
    "PREFIX_TOKENS",
    "STORE_FILE",
    "TOP_FILE",
    "HeadForm",
    "Store",
    "StoredGreedy",
    "StoredHead",
    "StoredReference",
    "StoredText",
    "StoredWindow",
    "TopForm",
    "chat_key",
    "is_store",
    "near_tie_bounds",
]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

STORE_FILE: Final = "reference.json"
HIDDEN_FILE: Final = "hidden.bin"
HEAD_FILE: Final = "head.safetensors"
TOP_FILE: Final = "top.bin"
PREFIX_TOKENS: Final = 256  # windows of the attribution's sample are cut to this
_UNIT_ROUNDOFF = 2.0**-24


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every record of a store."""


class HeadForm(_Record, frozen=True):
    """logits = softcap(scale · (W h + b)); W and b are in `head.safetensors`."""

    vocab_size: int
    hidden_size: int
    dtype: Literal["fp32", "bf16"]  # of the stored W; bf16 only where every weight is one exactly
    bias: bool
    scale: float
    softcap: float | None


class TopForm(_Record, frozen=True):
    """Only the likeliest tokens of each position are known: `top.bin`, see `TopRows`."""

    vocab_size: int
    count: int  # K


class StoredText(_Record, frozen=True):
    """One text: the file as it was, and the ids of each document."""

    name: str
    file: str
    sha256: str
    bytes: int
    content: str
    documents: tuple[tuple[str, tuple[int, ...]], ...]  # content, token ids
    chats: dict[str, tuple[int, ...]] = {}  # `chat_key` of a conversation → token ids


class StoredWindow(_Record, frozen=True):
    """Token ids that were fed."""

    token_ids: tuple[int, ...]


class StoredGreedy(_Record, frozen=True):
    """Greedy continuations of prompts of equal length."""

    prompts: tuple[tuple[int, ...], ...]
    steps: int
    answer: Continued


class Store(_Record, frozen=True):
    """The whole of `reference.json`."""

    schema_version: Literal[1]
    ready: Ready
    head: HeadForm | None  # None: `top` stands for it
    context: int
    window: int
    overlap: int
    max_tokens: int
    ignored_ids: tuple[int, ...]
    texts: tuple[StoredText, ...]
    windows: tuple[StoredWindow, ...]  # in the order of the rows of hidden.bin
    greedy: tuple[StoredGreedy, ...]
    noise_floor: NoiseFloor | None
    deviation: float  # largest |recomputed − the model's own logit| when it was written
    files: dict[str, FileEntry]
    top: TopForm | None = None


def chat_key(messages: Messages) -> str:
    """What tells a conversation from others."""
    return msgspec.json.encode(messages).decode()


def is_store(path: str | Path) -> bool:
    """Whether a folder holds a stored reference."""
    return (Path(path) / STORE_FILE).is_file()


class StoredHead:
    """Computes logits of hidden states as the reference's head does."""

    def __init__(self, form: HeadForm, weight: Float32, bias: Float32 | None) -> None:
        self._form, self._weight, self._bias = form, weight, bias
        self.row_norm = float(
            np.sqrt(np.einsum("vh,vh->v", weight, weight, dtype=np.float64)).max()
        )

    @classmethod
    def load(cls, file: Path, form: HeadForm) -> StoredHead:
        """Read the tensors; bf16 is widened, which is exact."""
        found = load_file(file)
        weight = found["weight"]
        if form.dtype == "bf16":
            weight = (weight.astype(np.uint32) << 16).view(np.float32)
        return cls(form, np.ascontiguousarray(weight, np.float32), found.get("bias"))

    def logits(self, hidden: Float32) -> Float32:
        """[N, H] → [N, V], float32."""
        products: Float32 = hidden @ self._weight.T
        if self._bias is not None:
            products += self._bias
        if self._form.scale != 1.0:
            products *= np.float32(self._form.scale)
        if self._form.softcap is not None:
            cap = np.float32(self._form.softcap)
            products /= cap
            np.tanh(products, out=products)
            products *= cap
        return products


def near_tie_bounds(hidden: Float32, row_norm: float, slope: float) -> Float64:
    """2 γ ‖h‖ max_v ‖W_v‖ · slope with γ = √H · 2⁻²⁴, per position [N]; see `reference`."""
    norms = np.sqrt(np.einsum("nh,nh->n", hidden, hidden, dtype=np.float64))
    found: Float64 = 2 * math.sqrt(hidden.shape[1]) * _UNIT_ROUNDOFF * row_norm * slope * norms
    return found


class StoredReference:
    """Answers like `ReferenceProcess`, from a store; needs neither torch nor the checkpoint.

    Raises:
        UsageError: If the folder is damaged or of another schema version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.store = _read(self.path)
        _check_files(self.path, self.store)
        self.seconds = 0.0
        rows = sum(len(window.token_ids) for window in self.store.windows)
        self._blocks = self._top_blocks(rows) if self.store.top else self._head_blocks(rows)
        self._starts: dict[bytes, int] = {}
        start = 0
        for window in self.store.windows:
            ids = np.array(window.token_ids, np.int64)
            for length in {len(ids), min(len(ids), PREFIX_TOKENS)}:
                self._starts.setdefault(ids[:length].tobytes(), start)
            start += len(ids)
        self._ids = {content: ids for text in self.store.texts for content, ids in text.documents}
        self._chats = {key: ids for text in self.store.texts for key, ids in text.chats.items()}
        self._asked: list[tuple[int, int]] = []
        self._greedy: list[Continued] = []

    def texts(self) -> list[Text]:
        """The texts that were stored."""
        return [Text(t.name, t.file, t.sha256, t.bytes, t.content) for t in self.store.texts]

    def ready(self) -> Ready:
        """Facts of the model when the store was written."""
        return self.store.ready

    def encode(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of stored documents.

        Raises:
            ParityError: If the bundle's tokenizer cuts the text into other documents.
        """
        unknown = [text for text in texts if text not in self._ids]
        if unknown:
            raise ParityError(
                f"{self.path}: the bundle's tokenizer cuts the stored texts into other documents "
                f"(one begins {unknown[0][:40]!r}); it is not the reference's tokenizer"
            )
        return tuple(self._ids[text] for text in texts)

    def encode_chats(self, chats: Sequence[Messages]) -> tuple[tuple[int, ...], ...]:
        """Token ids of stored conversations, by the checkpoint's own template."""
        return tuple(self._chats[chat_key(chat)] for chat in chats)

    def ask_score(
        self,
        token_ids: Int64,
        *,
        hidden: bool = False,
        other_path: bool = False,
        source: GivenSource | None = None,
    ) -> None:
        """Ask for a stored window, or for its beginning."""
        del hidden
        assert source is None, "no sources are stored"
        assert not other_path, "the noise floor was measured when the store was written"
        key = np.asarray(token_ids, np.int64).tobytes()
        if key not in self._starts:
            raise UsageError(
                f"{self.path}: a window of {len(token_ids)} tokens is not in the store; validate "
                "with the window, overlap and budget it was written with"
            )
        self._asked.append((self._starts[key], len(token_ids)))

    def read_score(self, rows: int) -> Iterator[ScoredBlock]:
        """The oldest unanswered window, in blocks of at most `rows` positions."""
        start, length = self._asked.pop(0)
        for at in range(0, length, rows):
            yield self._blocks(at, slice(start + at, start + min(at + rows, length)))

    def _head_blocks(self, rows: int) -> Callable[[int, slice], ScoredBlock]:
        form, slope = self.store.head, self.store.ready.head_slope
        assert form is not None
        head = StoredHead.load(self.path / HEAD_FILE, form)
        states = np.memmap(self.path / HIDDEN_FILE, "<f4", "r", shape=(rows, form.hidden_size))

        def block(at: int, inside: slice) -> ScoredBlock:
            hidden = np.array(states[inside])
            bound = near_tie_bounds(hidden, head.row_norm, 1.0 if slope is None else slope)
            return ScoredBlock(at, head.logits(hidden), bound, hidden)

        return block

    def _top_blocks(self, rows: int) -> Callable[[int, slice], ScoredBlock]:
        assert self.store.top is not None
        layout = TopRows.layout(self.store.top.count)
        stored = np.memmap(self.path / TOP_FILE, layout, "r", shape=(rows,))

        def block(at: int, inside: slice) -> ScoredBlock:
            top = TopRows.read(stored[inside])
            return ScoredBlock(at, np.empty((len(top), 0), np.float32), np.zeros(len(top)), top=top)

        return block

    def ask_greedy(self, prompts: Int64, steps: int, sources: Sequence[GivenSource] = ()) -> None:
        """Ask for stored greedy continuations, cut to `steps`."""
        assert not sources, "no sources are stored"
        wanted = tuple(tuple(row) for row in prompts.tolist())
        for found in self.store.greedy:
            if found.prompts == wanted and steps <= found.steps:
                answer = found.answer
                self._greedy.append(
                    Continued(
                        tuple(row[:steps] for row in answer.token_ids),
                        tuple(row[:steps] for row in answer.margins),
                        tuple(row[:steps] for row in answer.near_tie_bound),
                    )
                )
                return
        raise UsageError(
            f"{self.path}: no greedy runs of {steps} tokens are stored; pass --greedy-tokens 0 or "
            "write the store with as many"
        )

    def read_greedy(self) -> Continued:
        """The oldest unanswered continuations."""
        return self._greedy.pop(0)

    def draw(self, request: Draw) -> tuple[Drawn, Float32]:
        """Always refused: transformers' filters draw only where the model is."""
        del request
        raise UsageError(
            f"{self.path}: samplers are held against transformers itself; pass the checkpoint "
            "instead of a stored reference for --sampler"
        )

    def layer_states(self, token_ids: Int64, *, other_path: bool = False) -> Float32 | None:
        """Always refused: what lies between the layers is not stored."""
        del token_ids, other_path
        raise UsageError(
            f"{self.path}: states between layers are not stored; pass the checkpoint instead of a "
            "stored reference for --bisect"
        )

    def lens(self, token_ids: Int64) -> Lensed:
        """Always refused, as `layer_states`."""
        del token_ids
        raise UsageError(
            f"{self.path}: states between layers are not stored; pass the checkpoint instead of a "
            "stored reference for --lens"
        )


def _read(path: Path) -> Store:
    try:
        return msgspec.json.decode((path / STORE_FILE).read_bytes(), type=Store)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UsageError(
            f"{path / STORE_FILE}: no stored reference of this release ({error}); write it again "
            "with `headport reference`"
        ) from error


def _check_files(path: Path, store: Store) -> None:
    for name in (TOP_FILE,) if store.top else (HIDDEN_FILE, HEAD_FILE):
        file, entry = path / name, store.files.get(name)
        if entry is None or not file.is_file() or file_entry(file) != entry:
            raise UsageError(
                f"{file}: missing or changed since the store was written; write it again with "
                "`headport reference`"
            )
