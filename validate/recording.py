"""`headport reference`: run the PyTorch model once and keep what validation needs of it."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from headport.bundle import check_output, draft_bundle, file_entry
from headport.command import OptionRecord, Outcome, check_least, option, positional
from headport.errors import CheckpointError, ExportError, ParityError, UsageError
from headport.progress import bar
from headport.validate.attribution import noise_floor, sampled_jobs
from headport.validate.comparison import Material, jobs_of, prepare
from headport.validate.documents import Tokens, read_texts
from headport.validate.greedy import grouped_prompts
from headport.validate.local_reference import LocalReference
from headport.validate.records import Messages
from headport.validate.reference import Reference
from headport.validate.reference_process import ADAPTER_FLAG
from headport.validate.store import (
    HEAD_FILE,
    HIDDEN_FILE,
    STORE_FILE,
    TOP_FILE,
    HeadForm,
    Store,
    StoredGreedy,
    StoredHead,
    StoredText,
    StoredWindow,
    TopForm,
    chat_key,
    near_tie_bounds,
)
from headport.validate.top_rows import TopRows
from headport.validate.wire import Score

__all__ = ["SUMMARY", "Options", "Stored", "record", "run"]

SUMMARY = "Store a PyTorch reference on texts, for validation without torch and checkpoint."

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
_LEAST_TOP = 16  # agreements look at the first ten
_BLOCK_ROWS = 64
_UNSTATED_CONTEXT = 1 << 20


class Options(OptionRecord, frozen=True):
    """Options of `headport reference`."""

    model: Annotated[str, positional("Hugging Face folder, .gguf file or module:function")]
    text: Annotated[
        tuple[Path, ...], option("plain UTF-8 texts, each reported by name", metavar="FILE")
    ]
    output: Annotated[Path, option("folder to write", flag="-o", metavar="FOLDER")]
    max_tokens: Annotated[
        int, option("tokens to score in all, an equal share of each text (default: 0, all)")
    ] = 0
    window: Annotated[int, option("tokens fed at once at most; the context bounds it too")] = 1024
    overlap: Annotated[
        int, option("tokens that a window repeats of the one before, as context only")
    ] = 0
    ignore_ids: Annotated[
        tuple[int, ...], option("token ids that are fed but not scored", metavar="ID")
    ] = ()
    greedy_tokens: Annotated[int, option("new tokens of each greedy run, 0 for none")] = 32
    noise_floor_tokens: Annotated[
        int, option("tokens on which the reference is held against itself, 0 for none")
    ] = 256
    top: Annotated[
        int,
        option(
            "keep so many likeliest tokens of a position and the mass of the rest, for models "
            "whose head cannot be stored (default: 0, hidden states and head)",
            metavar="K",
        ),
    ] = 0
    adapter: Annotated[Path | None, option("as for export", metavar="FOLDER")] = None
    trust_remote_code: Annotated[bool, option("as for export")] = False
    allow_pickle: Annotated[bool, option("as for export")] = False
    force: Annotated[bool, option("replace an existing store")] = False


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    path: str
    tokens: int
    bytes: int
    logit_bytes: int  # that full float32 logits of the same positions would take
    deviation: float  # largest |recomputed − the model's own logit|


class _Tokenizer:
    """The checkpoint's tokenizer as `prepare` wants it."""

    def __init__(self, reference: Reference) -> None:
        self._reference, self._inner = reference, reference.tokenizer
        if not getattr(self._inner, "is_fast", False):
            raise CheckpointError(
                f"{type(self._inner).__name__} does not say where in the text its tokens lie; "
                "a checkpoint with a tokenizer.json was expected"
            )

    def encode(self, text: str, *, special_tokens: bool = True) -> Tokens:
        found = self._inner(text, return_offsets_mapping=True, add_special_tokens=special_tokens)
        ends = [end for _, end in found["offset_mapping"]]
        return Tokens(np.array(found["input_ids"], np.int64), np.array(ends, np.int64))

    def render(self, messages: Messages, reply: bool) -> str:
        return self._reference.render(list(messages), reply=reply)

    def count_tokens(self, text: str) -> int:
        return len(self._inner(text, add_special_tokens=False)["input_ids"])


def record(options: Options) -> Stored:
    """Write a stored reference.

    Raises:
        UsageError: If an option or a text is not usable.
        CheckpointError: If the model cannot be loaded, or its logits are not those of one matrix.
        OutputError: If the output exists and `force` is False.
        ParityError: If the stored head does not give the model's own logits again.
    """
    check_output(options.output, force=options.force, marker=STORE_FILE)
    _check(options)
    texts = read_texts(options.text)
    flags = [f"--{n.replace('_', '-')}" for n in ("trust_remote_code", "allow_pickle")]
    given = [f for f in flags if getattr(options, f[2:].replace("-", "_"))]
    given += [] if options.adapter is None else [f"{ADAPTER_FLAG}{options.adapter}"]
    reference = Reference(options.model, *given)
    writer = _TopWriter(reference, options.top) if options.top else _StateWriter(reference)
    materials = prepare(texts, _Tokenizer(reference), options.max_tokens, options.ignore_ids)
    context = _context(reference)
    window = min(options.window, context)
    with draft_bundle(options.output, force=options.force, marker=STORE_FILE) as draft:
        windows = _write_windows(
            materials, (window, options.overlap), reference, writer, draft.path
        )
        local = LocalReference(reference)
        sampled = sampled_jobs(materials, window, options.overlap, options.noise_floor_tokens)
        floor = noise_floor(sampled, local, _BLOCK_ROWS) if options.noise_floor_tokens else None
        store = Store(
            schema_version=1,
            ready=writer.ready,
            head=writer.form,
            top=writer.top,
            context=context,
            window=window,
            overlap=options.overlap,
            max_tokens=options.max_tokens,
            ignored_ids=options.ignore_ids,
            texts=tuple(_stored_text(material) for material in materials),
            windows=windows,
            greedy=_greedy(materials, local, context, options.greedy_tokens),
            noise_floor=floor,
            deviation=writer.deviation,
            files={n: file_entry(draft.path / n) for n in writer.files},
        )
        (draft.path / STORE_FILE).write_bytes(msgspec.json.encode(store))
        size = sum(file.stat().st_size for file in draft.path.iterdir())
        draft.place()
    tokens = sum(len(found.token_ids) for found in windows)
    return Stored(
        path=str(options.output),
        tokens=tokens,
        bytes=size,
        logit_bytes=4 * tokens * reference.ready.facts.vocab_size,
        deviation=writer.deviation,
    )


_LEAST = {"max_tokens": 0, "window": 1, "overlap": 0, "greedy_tokens": 0, "noise_floor_tokens": 0}


def _check(options: Options) -> None:
    check_least(options, _LEAST)
    if not options.text:
        raise UsageError("--text: at least one file expected, none given")
    if options.overlap >= options.window:
        raise UsageError(f"--overlap: less than the window of {options.window} tokens expected")


def _context(reference: Reference) -> int:
    from headport.export.description import context_length

    return (context_length(reference.model) or _UNSTATED_CONTEXT) - reference.learnt_tokens


def _head(reference: Reference) -> tuple[HeadForm, StoredHead, dict[str, Any]]:
    """The head's form, a head that computes with it, and the tensors to store."""
    from headport.export.head import probe_head

    try:
        found = probe_head(reference.model)
    except ExportError as error:
        raise CheckpointError(
            f"a reference with one head matrix can be stored with its hidden states: {error}; pass "
            "--top 256 to keep the likeliest tokens instead"
        ) from error
    weight: Float32 = np.ascontiguousarray(found.weight.detach().float().numpy())
    bias = None if found.bias is None else found.bias.detach().float().numpy()
    bits = weight.view(np.uint32)
    narrow = not (bits & 0xFFFF).any()
    form = HeadForm(
        vocab_size=weight.shape[0],
        hidden_size=weight.shape[1],
        dtype="bf16" if narrow else "fp32",
        bias=bias is not None,
        scale=found.scale,
        softcap=found.softcap,
    )
    tensors: dict[str, Any] = {"weight": (bits >> 16).astype(np.uint16) if narrow else weight}
    if bias is not None:
        tensors["bias"] = np.ascontiguousarray(bias)
    return form, StoredHead(form, weight, bias), tensors


class _StateWriter:
    """Keeps what goes into the head, and proves of every position that it gives the logits."""

    files = (HIDDEN_FILE, HEAD_FILE)
    top = None

    def __init__(self, reference: Reference) -> None:
        self.ready = reference.ready
        self.form, self._head, self._tensors = _head(reference)
        self.deviation = 0.0

    def write(self, stream: IO[bytes], hidden: Float32, logits: Float32, targets: Int64) -> None:
        del targets
        slope = self.ready.head_slope
        for at in range(0, len(hidden), _BLOCK_ROWS):
            inside = slice(at, at + _BLOCK_ROWS)
            error = np.abs(self._head.logits(hidden[inside]) - logits[inside]).max(axis=1)
            bound = near_tie_bounds(hidden[inside], self._head.row_norm, slope or 1.0)
            if not (error <= bound).all():
                raise ParityError(
                    f"the stored head differs from the model's logits by {error.max():.3g}, "
                    f"more than rounding explains ({bound.min():.3g}); nothing was written"
                )
            self.deviation = max(self.deviation, float(error.max()))
        stream.write(hidden.astype("<f4", copy=False).tobytes())

    def finish(self, folder: Path) -> None:
        save_file(self._tensors, folder / HEAD_FILE)


class _TopWriter:
    """Keeps the likeliest tokens; the reference then counts as one whose head is not known."""

    files = (TOP_FILE,)
    form = None
    deviation = 0.0  # nothing is computed again

    def __init__(self, reference: Reference, count: int) -> None:
        size = reference.ready.facts.vocab_size
        if not _LEAST_TOP <= count <= size:
            raise UsageError(
                f"--top: {_LEAST_TOP} to the vocabulary's {size} expected, {count} given"
            )
        self.ready = msgspec.structs.replace(reference.ready, head_slope=None, hidden_size=0)
        self.top = TopForm(vocab_size=size, count=count)

    def write(self, stream: IO[bytes], hidden: Any, logits: Float32, targets: Int64) -> None:
        del hidden
        for at in range(0, len(logits), _BLOCK_ROWS):
            inside = slice(at, at + _BLOCK_ROWS)
            rows = TopRows.of_logits(logits[inside], targets[inside], self.top.count)
            stream.write(rows.stored().tobytes())

    def finish(self, folder: Path) -> None:
        del folder


def _write_windows(
    materials: list[Material],
    cut: tuple[int, int],
    reference: Reference,
    writer: _StateWriter | _TopWriter,
    folder: Path,
) -> tuple[StoredWindow, ...]:
    windows = []
    tokens = sum(d.used - 1 for m in materials for d in m.documents)
    with (folder / writer.files[0]).open("wb") as stream, bar(tokens, "reference", "token") as done:
        for job in jobs_of(materials, *cut):
            ids = tuple(job.window.token_ids.tolist())
            _, arrays = reference.score(Score(ids, hidden=True))
            writer.write(stream, arrays[0], arrays[-1], job.window.targets)
            windows.append(StoredWindow(token_ids=ids))
            done.update(len(ids))
    writer.finish(folder)
    return tuple(windows)


def _stored_text(material: Material) -> StoredText:
    text = material.text
    return StoredText(
        name=text.name,
        file=text.file,
        sha256=text.sha256,
        bytes=text.bytes,
        content=text.content,
        documents=tuple((d.content, tuple(d.token_ids.tolist())) for d in material.documents),
        chats={
            chat_key(d.messages): tuple(d.token_ids.tolist())
            for d in material.documents
            if d.messages is not None
        },
    )


def _greedy(
    materials: list[Material], reference: LocalReference, context: int, steps: int
) -> tuple[StoredGreedy, ...]:
    found = []
    for prompts, count in grouped_prompts(materials, context, steps):
        reference.ask_greedy(prompts, count)
        found.append(
            StoredGreedy(
                prompts=tuple(tuple(row) for row in prompts.tolist()),
                steps=count,
                answer=reference.read_greedy(),
            )
        )
    return tuple(found)


def run(options: Options) -> Outcome:
    """Write the store and say how large it is."""
    stored = record(options)
    text = (
        f"{stored.path}: {stored.tokens} tokens in {stored.bytes / 1e6:.1f} MB, "
        f"1/{stored.logit_bytes / stored.bytes:.1f} of their logits"
    )
    if not options.top:
        text += f"; largest difference to the model's own logits {stored.deviation:.1e}"
    return Outcome(text, stored)
