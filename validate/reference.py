"""The reference, in a process of its own: `python -m headport.validate.reference MODEL`.

It reads requests on stdin and answers on stdout (`headport.validate.wire`). It imports torch,
transformers and the loading of checkpoints, no graph or runtime code, so a fault there cannot
reach both sides of the comparison.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from headport.errors import CheckpointError
from headport.export.checkpoint import (
    SOURCED,
    Checkpoint,
    checkpoint_kind,
    find_checkpoint,
    load_model,
    load_tokenizer,
)
from headport.export.tuning.applied import check_adaptable, put_beside
from headport.export.tuning.learnt import LearntTokens
from headport.validate.answering import Writer, serve
from headport.validate.given_source import GivenSource
from headport.validate.head_watch import HeadWatch
from headport.validate.layers import LayerWatch
from headport.validate.lens import read_layers
from headport.validate.other_path import OtherPath
from headport.validate.reference_condition import tell_condition
from headport.validate.reference_facts import reference_facts
from headport.validate.reference_sampler import distribution, draw
from headport.validate.report import ReferenceFacts
from headport.validate.sourced_model import SourcedModel
from headport.validate.wire import (
    Continued,
    ContinueGreedily,
    Draw,
    Drawn,
    Encode,
    EncodeChats,
    Encoded,
    Layered,
    Layers,
    Lens,
    Lensed,
    Ready,
    Request,
    Score,
    Scored,
)

__all__ = ["Reference", "main"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_PROBE_TOKENS = 8
_ADAPTER = "--adapter="  # as reference_process.py writes it
_SOURCED = "--sourced"
_PROJECTION, _CONDITION = "--projection=", "--condition="


class Reference:
    """The loaded PyTorch model in float32: causal, or a decoder that answers to a source."""

    def __init__(self, model: str, *flags: str) -> None:
        checkpoint = find_checkpoint(
            model,
            trust_remote_code="--trust-remote-code" in flags,
            allow_pickle="--allow-pickle" in flags,
        )
        self.tokenizer = load_tokenizer(checkpoint)
        self.model = _load(checkpoint, sourced=_SOURCED in flags)
        folders = [f.removeprefix(_ADAPTER) for f in flags if f.startswith(_ADAPTER)]
        self._tuned = None
        if folders:
            check_adaptable(checkpoint, checkpoint_kind(checkpoint))
            # Beside the weights, as it was trained: the bundle holds it merged.
            self._tuned = put_beside(self.model, Path(folders[0]))
        told = [f.removeprefix(_CONDITION) for f in flags if f.startswith(_CONDITION)]
        files = [f.removeprefix(_PROJECTION) for f in flags if f.startswith(_PROJECTION)]
        for condition, file in zip(told, files, strict=True):
            tell_condition(self.model, Path(file), condition)
        self._watch = HeadWatch(self.model)
        self._slope: float | None = None
        vocab_size = self._probe()
        self._other = OtherPath(self.model)
        states = self._watch.hidden_states()
        self.ready = Ready(
            self._facts(checkpoint, vocab_size),
            self._slope,
            self._other.name,
            0 if states is None else states.shape[1],
            self.model.start_token if isinstance(self.model, SourcedModel) else None,
        )

    @property
    def learnt_tokens(self) -> int:
        """Places of the context that an adapter's learnt tokens take before every sequence."""
        return self._tuned.tokens if isinstance(self._tuned, LearntTokens) else 0

    def _probe(self) -> int:
        size = int(self.model.get_input_embeddings().weight.shape[0])
        token_ids = torch.arange(_PROBE_TOKENS).remainder(size)[None]
        with torch.inference_mode():
            logits = self.model(input_ids=token_ids, use_cache=False).logits
        if self._watch.output is not None:
            self._slope = self._watch.slope(logits)
        return int(logits.shape[-1])

    def _facts(self, checkpoint: Checkpoint, vocab_size: int) -> ReferenceFacts:
        model = self.model.inner if isinstance(self.model, SourcedModel) else self.model
        facts = reference_facts(checkpoint, model, self.tokenizer, vocab_size)
        if self._tuned is None:
            return facts
        name, sha256 = self._tuned.origin(facts.checkpoint, facts.sha256)
        return msgspec.structs.replace(facts, checkpoint=name, sha256=sha256)

    def _bound(self, logits: torch.Tensor) -> Float64:
        if self._slope is None:
            return np.zeros(logits.shape[:2])
        # A broken model has no norms; its logits say so, and JSON knows no NaN.
        return np.nan_to_num(self._watch.product_bound() * self._slope)

    def encode(self, texts: tuple[str, ...]) -> Encoded:
        """Token ids as the checkpoint's tokenizer gives them by default."""
        return Encoded(tuple(tuple(self.tokenizer(text)["input_ids"]) for text in texts))

    def encode_chats(self, request: EncodeChats) -> Encoded:
        """Token ids of conversations by the checkpoint's own chat template."""
        return Encoded(tuple(tuple(self._chat(list(chat))) for chat in request.chats))

    def render(self, messages: list[dict[str, Any]], *, reply: bool) -> str:
        """A conversation as the chat template writes it; `reply`: with a reply opened.

        Raises:
            CheckpointError: If there is no template, or it refuses the messages.
        """
        return str(self._applied(messages, tokenize=False, add_generation_prompt=reply))

    def _chat(self, messages: list[dict[str, Any]]) -> list[int]:
        found = self._applied(messages, tokenize=True, return_dict=True)
        return list(found["input_ids"])

    def _applied(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # templates are programs and raise what they like
            raise CheckpointError(
                f"the checkpoint's chat template does not take a conversation: {error}"
            ) from error

    def _read(self, source: GivenSource | None) -> None:
        if source is not None:
            self.model.read(source)

    def score(self, request: Score) -> tuple[Scored, tuple[Float32, ...]]:
        """The announcement; what goes into the head [T, H], if asked for, and logits [T, V]."""
        started = time.perf_counter()
        self._read(request.source)
        token_ids = torch.tensor([request.token_ids])
        with torch.inference_mode():
            if request.other_path:
                found = self._other.logits(token_ids)
                bound = np.zeros(found.shape[1])  # its head may have run in parts
            else:
                found = self.model(input_ids=token_ids, use_cache=False).logits
                bound = self._bound(found)[0]
            logits: Float32 = found[0].float().contiguous().numpy()
        seconds = time.perf_counter() - started
        hidden = self._watch.hidden_states() if request.hidden else None
        size = 0 if hidden is None else hidden.shape[1]
        answer = Scored(len(logits), logits.shape[1], size, tuple(bound.tolist()), seconds)
        return answer, (logits,) if hidden is None else (hidden, logits)

    def layers(self, request: Layers) -> tuple[Layered, tuple[Float32, ...]]:
        """The announcement, and the states between layers [stages, T, H] if there are such."""
        token_ids = torch.tensor([request.token_ids])

        def run() -> None:
            with torch.inference_mode():
                if request.other_path:
                    self._other.logits(token_ids)
                else:
                    self.model(input_ids=token_ids, use_cache=False)

        states = LayerWatch(self.model).states(run)
        if states is None:
            return Layered(0, 0, 0), ()
        return Layered(*states.shape), (states,)

    def lens(self, request: Lens) -> Lensed:
        """What it would say after each layer."""
        found = read_layers(self.model, torch.tensor([request.token_ids]))
        if found is None:
            return Lensed((), (), ())
        best, choices = found.max(dim=-1)
        final = choices[-1].expand(len(found), -1)[..., None]
        of_final = found.gather(-1, final)[..., 0]
        return Lensed(
            _rows(choices.tolist()), _rows(best.exp().tolist()), _rows(of_final.exp().tolist())
        )

    def draw(self, request: Draw) -> tuple[Drawn, Float32]:
        """Tokens drawn from the logits after the request's tokens, and these logits [V]."""
        self._read(request.source)
        with torch.inference_mode():
            output = self.model(input_ids=torch.tensor([request.token_ids]), use_cache=False)
            row = output.logits[0, -1].float().contiguous()
        found = [draw(row, case, request.keys) for case in request.cases]
        answer = Drawn(
            vocab_size=len(row),
            tokens=tuple(tokens for tokens, _ in found),
            kept=tuple(kept for _, kept in found),
            distribution=distribution(row, request.free),
        )
        logits: Float32 = row.numpy()
        return answer, logits

    def continue_greedily(
        self,
        prompts: tuple[tuple[int, ...], ...],
        steps: int,
        sources: tuple[GivenSource, ...] = (),
    ) -> Continued:
        """Greedy tokens, ties by lowest id, end-of-text tokens not heeded."""
        parts = []
        for prompt, source in zip(prompts, sources, strict=bool(sources)):
            self._read(source)
            parts.append(self._continue((prompt,), steps))
        if not sources:
            return self._continue(prompts, steps)
        return Continued(
            tuple(row for part in parts for row in part.token_ids),
            tuple(row for part in parts for row in part.margins),
            tuple(row for part in parts for row in part.near_tie_bound),
        )

    def _continue(self, prompts: tuple[tuple[int, ...], ...], steps: int) -> Continued:
        history = torch.tensor(prompts)
        fed, cache = history, None
        margins, bounds = [], []
        with torch.inference_mode():
            for _ in range(steps):
                given: dict[str, Any] = {} if cache is None else {"cache": cache}
                output = self.model(input_ids=fed, use_cache=True, **given)
                last: Float32 = output.logits[:, -1].float().numpy()
                best = np.partition(last, -2, axis=1)[:, -2:].astype(np.float64)
                margins.append(np.nan_to_num(best[:, 1] - best[:, 0]))
                bounds.append(self._bound(output.logits)[:, -1])
                chosen = torch.from_numpy(last.argmax(axis=1))[:, None]
                history = torch.cat([history, chosen], dim=1)
                cache = getattr(output, "cache", None)
                fed = history if cache is None else chosen
        new = history[:, len(prompts[0]) :].tolist()
        return Continued(_rows(new), _rows(np.transpose(margins)), _rows(np.transpose(bounds)))


def _load(checkpoint: Checkpoint, *, sourced: bool) -> Any:
    if not sourced:
        return load_model(checkpoint, dtype=torch.float32)
    kind = checkpoint_kind(checkpoint)
    if kind not in SOURCED:
        raise CheckpointError(
            f"{checkpoint.name}: an encoder-decoder model was expected, as the bundle is one; its "
            "config names another kind"
        )
    return SourcedModel(load_model(checkpoint, dtype=torch.float32, kind=kind))


def _rows(table: Any) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row.tolist() if isinstance(row, np.ndarray) else row) for row in table)


def _answer(reference: Reference, request: Request, writer: Writer) -> None:
    match request:
        case Score():
            writer.put(*reference.score(request))
        case Layers():
            writer.put(*reference.layers(request))
        case Lens():
            writer.put(reference.lens(request))
        case Encode(texts):
            writer.put(reference.encode(texts))
        case EncodeChats():
            writer.put(reference.encode_chats(request))
        case Draw():
            answer, logits = reference.draw(request)
            writer.put(answer, (logits,))
        case ContinueGreedily(token_ids, steps, sources):
            writer.put(reference.continue_greedily(token_ids, steps, sources))


def main(arguments: list[str]) -> int:
    """Serve until stdin closes."""
    return serve(lambda: Reference(*arguments), _answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
