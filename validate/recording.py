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
from headport.validate.store import (
    HEAD_FILE,
    HIDDEN_FILE,
    STORE_FILE,
    HeadForm,
    Store,
    StoredGreedy,
    StoredHead,
    StoredText,
    StoredWindow,
    chat_key,
    near_tie_bounds,
)
from headport.validate.wire import Score

__all__ = ["SUMMARY", "Options", "Stored", "record", "run"]

SUMMARY = "Store a PyTorch reference on texts, for validation without torch and checkpoint."

Float32 = npt.NDArray[np.float32]
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
    reference = Reference(options.model, *given)
    form, head, tensors = _head(reference)
    materials = prepare(texts, _Tokenizer(reference), options.max_tokens, options.ignore_ids)
    context = _context(reference)
    window = min(options.window, context)
    with draft_bundle(options.output, force=options.force, marker=STORE_FILE) as draft:
        with (draft.path / HIDDEN_FILE).open("wb") as stream:
            windows, deviation = _write_states(
                materials, (window, options.overlap), reference, head, stream
            )
        save_file(tensors, draft.path / HEAD_FILE)
        local = LocalReference(reference)
        sampled = sampled_jobs(materials, window, options.overlap, options.noise_floor_tokens)
        floor = noise_floor(sampled, local, _BLOCK_ROWS) if options.noise_floor_tokens else None
        store = Store(
            schema_version=1,
            ready=reference.ready,
            head=form,
            context=context,
            window=window,
            overlap=options.overlap,
            max_tokens=options.max_tokens,
            ignored_ids=options.ignore_ids,
            texts=tuple(_stored_text(material) for material in materials),
            windows=windows,
            greedy=_greedy(materials, local, context, options.greedy_tokens),
            noise_floor=floor,
            deviation=deviation,
            files={n: file_entry(draft.path / n) for n in (HIDDEN_FILE, HEAD_FILE)},
        )
        (draft.path / STORE_FILE).write_bytes(msgspec.json.encode(store))
        size = sum(file.stat().st_size for file in draft.path.iterdir())
        draft.place()
    tokens = sum(len(found.token_ids) for found in windows)
    return Stored(
        path=str(options.output),
        tokens=tokens,
        bytes=size,
        logit_bytes=4 * tokens * form.vocab_size,
        deviation=deviation,
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

    return context_length(reference.model) or _UNSTATED_CONTEXT


def _head(reference: Reference) -> tuple[HeadForm, StoredHead, dict[str, Any]]:
    """The head's form, a head that computes with it, and the tensors to store."""
    from headport.export.head import probe_head

    try:
        found = probe_head(reference.model)
    except ExportError as error:
        raise CheckpointError(f"a reference with one head matrix can be stored: {error}") from error
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


def _write_states(
    materials: list[Material],
    cut: tuple[int, int],
    reference: Reference,
    head: StoredHead,
    stream: IO[bytes],
) -> tuple[tuple[StoredWindow, ...], float]:
    """Write what goes into the head, and prove of every position that it gives the logits."""
    windows, deviation = [], 0.0
    slope = reference.ready.head_slope
    tokens = sum(d.used - 1 for m in materials for d in m.documents)
    with bar(tokens, "reference", "token") as progress:
        for job in jobs_of(materials, *cut):
            ids = tuple(job.window.token_ids.tolist())
            _, (hidden, logits) = reference.score(Score(ids, hidden=True))
            for at in range(0, len(ids), _BLOCK_ROWS):
                inside = slice(at, at + _BLOCK_ROWS)
                error = np.abs(head.logits(hidden[inside]) - logits[inside]).max(axis=1)
                bound = near_tie_bounds(hidden[inside], head.row_norm, slope or 1.0)
                if not (error <= bound).all():
                    raise ParityError(
                        f"the stored head differs from the model's logits by {error.max():.3g}, "
                        f"more than rounding explains ({bound.min():.3g}); nothing was written"
                    )
                deviation = max(deviation, float(error.max()))
            stream.write(hidden.astype("<f4", copy=False).tobytes())
            windows.append(StoredWindow(token_ids=ids))
            progress.update(len(ids))
    return tuple(windows), deviation


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
        f"1/{stored.logit_bytes / stored.bytes:.1f} of their logits; largest difference to the "
        f"model's own logits {stored.deviation:.1e}"
    )
    return Outcome(text, stored)
