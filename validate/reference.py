"""The reference, in a process of its own: `python -m headport.validate.reference MODEL`.

It reads requests on stdin and answers on stdout (`headport.validate.wire`). It imports torch,
transformers and the loading of checkpoints, no graph or runtime code, so a fault there cannot
reach both sides of the comparison.
"""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

from headport.errors import CheckpointError, HeadportError
from headport.export.checkpoint import (
    checkpoint_kind,
    checkpoint_sha256,
    find_checkpoint,
    load_model,
    load_tokenizer,
)
from headport.export.tuning.applied import check_adaptable, put_beside
from headport.validate.layers import LayerWatch
from headport.validate.lens import read_layers
from headport.validate.other_path import OtherPath
from headport.validate.reference_sampler import distribution, draw
from headport.validate.report import ReferenceFacts
from headport.validate.wire import (
    Answer,
    Continued,
    ContinueGreedily,
    Draw,
    Drawn,
    Encode,
    EncodeChats,
    Encoded,
    Failure,
    Layered,
    Layers,
    Lens,
    Lensed,
    Ready,
    Request,
    Score,
    Scored,
    read_request,
    write_message,
)

__all__ = ["Reference", "main"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_UNIT_ROUNDOFF = 2.0**-24  # float32, round to nearest
_PROBE_TOKENS = 8
_ADAPTER = "--adapter="  # as reference_process.py writes it


class _HeadWatch:
    """Sees what goes into the head's matrix and what comes out of it."""

    def __init__(self, model: Any) -> None:
        self.input: torch.Tensor | None = None
        self.output: torch.Tensor | None = None
        module = model.get_output_embeddings()
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            norms = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float64)
            self._row_norm = float(norms.max())
            module.register_forward_hook(self._see)

    def _see(self, _module: Any, args: Any, output: Any) -> None:
        self.input, self.output = args[0], output

    def hidden_states(self) -> Float32 | None:
        """What went into the matrix last, [T, H]; None for a head that is not watched."""
        if self.input is None:
            return None
        found: Float32 = self.input.reshape(-1, self.input.shape[-1]).float().numpy()
        return np.ascontiguousarray(found)

    def product_bound(self) -> Float64:
        """Bound on the rounding of a difference of two products, per position [B, T].

        2 γ ‖h‖ max_v ‖W_v‖ with γ = √H · 2⁻²⁴: a dot product of length H rounds by at most
        γ |h|·|W_v| with high probability, and |h|·|W_v| ≤ ‖h‖ ‖W_v‖.

        Source: Higham & Mary 2019, "A new approach to probabilistic rounding error analysis",
        SIAM J. Sci. Comput. 41(5), theorem 2.4 with λ = 1.
        """
        assert self.input is not None
        hidden = self.input.double()
        norms: Float64 = torch.linalg.vector_norm(hidden, dim=-1).numpy()
        return 2 * math.sqrt(hidden.shape[-1]) * _UNIT_ROUNDOFF * self._row_norm * norms

    def slope(self, logits: torch.Tensor) -> float:
        """Largest |Δlogit / Δhead output| between positions: the scale that follows the head.

        Differences between positions leave out a bias added after the head; a softcap only
        lowers the slope.
        """
        assert self.output is not None
        products, logits = self.output[0].double(), logits[0].double()
        if products.shape != logits.shape or torch.equal(products, logits):
            return 1.0
        steps = (products[1:] - products[:1]).abs()
        clear = steps > 1e-2 * steps.max()  # small steps would divide by rounding noise
        return float(((logits[1:] - logits[:1]).abs()[clear] / steps[clear]).max())


class Reference:
    """The loaded PyTorch model, as a causal language model in float32."""

    def __init__(self, model: str, *flags: str) -> None:
        checkpoint = find_checkpoint(
            model,
            trust_remote_code="--trust-remote-code" in flags,
            allow_pickle="--allow-pickle" in flags,
        )
        self.tokenizer = load_tokenizer(checkpoint)
        self.model = load_model(checkpoint, dtype=torch.float32)
        folders = [f.removeprefix(_ADAPTER) for f in flags if f.startswith(_ADAPTER)]
        self._tuned = None
        if folders:
            check_adaptable(checkpoint, checkpoint_kind(checkpoint))
            # Beside the weights, as it was trained: the bundle holds it merged.
            self._tuned = put_beside(self.model, Path(folders[0]))
        self._watch = _HeadWatch(self.model)
        self._slope: float | None = None
        vocab_size = self._probe()
        self._other = OtherPath(self.model)
        states = self._watch.hidden_states()
        self.ready = Ready(
            self._facts(checkpoint, vocab_size),
            self._slope,
            self._other.name,
            0 if states is None else states.shape[1],
        )

    def _probe(self) -> int:
        size = int(self.model.get_input_embeddings().weight.shape[0])
        token_ids = torch.arange(_PROBE_TOKENS).remainder(size)[None]
        with torch.inference_mode():
            logits = self.model(input_ids=token_ids, use_cache=False).logits
        if self._watch.output is not None:
            self._slope = self._watch.slope(logits)
        return int(logits.shape[-1])

    def _facts(self, checkpoint: Any, vocab_size: int) -> ReferenceFacts:
        import tokenizers
        import transformers

        model, name, sha256 = self.model, checkpoint.name, checkpoint_sha256(checkpoint)
        if self._tuned is not None:
            name, sha256 = self._tuned.origin(name, sha256)
        return ReferenceFacts(
            checkpoint=name,
            format=checkpoint.format,
            sha256=sha256,
            model=type(model).__name__,
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
            parameters=sum(p.numel() for p in model.parameters()),
            attention=str(model.config._attn_implementation),
            tokenizer=type(self.tokenizer).__name__,
            vocab_size=vocab_size,
            threads=torch.get_num_threads(),
            versions={
                "torch": str(torch.__version__),
                "transformers": str(transformers.__version__),
                "tokenizers": str(tokenizers.__version__),
            },
        )

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

    def score(self, request: Score) -> tuple[Scored, tuple[Float32, ...]]:
        """The announcement; what goes into the head [T, H], if asked for, and logits [T, V]."""
        started = time.perf_counter()
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

    def continue_greedily(self, prompts: tuple[tuple[int, ...], ...], steps: int) -> Continued:
        """Greedy tokens, ties by lowest id, end-of-text tokens not heeded."""
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


def _rows(table: Any) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row.tolist() if isinstance(row, np.ndarray) else row) for row in table)


class _Writer:
    """Writes answers from a second thread, so that the next window is computed meanwhile.

    At most one answer waits and one is written: memory does not grow with the text.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._queue: queue.Queue[tuple[Answer, tuple[Float32, ...]] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, answer: Answer, arrays: tuple[Float32, ...] = ()) -> None:
        self._queue.put((answer, arrays))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                write_message(self._stream, item[0])
                for array in item[1]:
                    self._stream.write(array.astype("<f4", copy=False).data.cast("B"))
                self._stream.flush()
        except OSError:  # nobody listens any more
            os._exit(1)


def _serve(reference: Reference, requests: IO[bytes], writer: _Writer) -> None:
    while (request := read_request(requests)) is not None:
        _answer(reference, request, writer)


def _answer(reference: Reference, request: Request, writer: _Writer) -> None:
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
        case ContinueGreedily(token_ids, steps):
            writer.put(reference.continue_greedily(token_ids, steps))


def main(arguments: list[str]) -> int:
    """Serve until stdin closes."""
    # Libraries print on stdout; answers keep a descriptor of their own.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    writer = _Writer(answers)
    try:
        reference = Reference(*arguments)
        writer.put(reference.ready)
        _serve(reference, sys.stdin.buffer, writer)
    except HeadportError as error:
        writer.put(Failure(type(error).__name__, str(error)))
        return error.exit_code
    except MemoryError as error:
        writer.put(Failure(CheckpointError.__name__, f"the reference ran out of memory: {error}"))
        return CheckpointError.exit_code
    finally:
        writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
