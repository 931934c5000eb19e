"""What PyTorch says with heads that choose no next token, in a process of its own.

`python -m headport.validate.heads.reference MODEL [--head=NAME=FILE …]`; as
`headport.validate.reference`, it imports no graph or runtime code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from headport.errors import CheckpointError
from headport.export.checkpoint import (
    SOURCED,
    Checkpoint,
    checkpoint_kind,
    find_checkpoint,
    load_model,
    load_tokenizer,
    run_reference,
)
from headport.export.heads.files import load_head
from headport.export.heads.found import value_head_in
from headport.export.heads.modules import MultiTaskHead, TreeSoftmax, ValueHead, VocabularyHead
from headport.export.heads.request import HeadRequest, parse_heads
from headport.validate.answering import Writer, serve
from headport.validate.reference_facts import reference_facts
from headport.validate.wire import Answered, AskHeads, Encode, Encoded, Ready, Request

__all__ = ["HEAD_FLAG", "HeadsReference", "main"]

Float32 = npt.NDArray[np.float32]
_Answers = dict[str, torch.Tensor]

HEAD_FLAG = "--head="
_VALUE, _LABELS, _MASKED = "value", "labels", "mlm"  # what export calls what it finds


class HeadsReference:
    """A checkpoint and all heads that are not its LM head, in float32.

    Args:
        model: As `headport export` takes it.
        flags: --trust-remote-code, --allow-pickle, and --head=NAME=FILE or --head=NAME=auto for
            each head that export was given.

    Raises:
        CheckpointError: If a model or head does not load, or the model reads a source.
        UsageError: If a --head is malformed.
    """

    def __init__(self, model: str, *flags: str) -> None:
        checkpoint = find_checkpoint(
            model,
            trust_remote_code="--trust-remote-code" in flags,
            allow_pickle="--allow-pickle" in flags,
        )
        kind = checkpoint_kind(checkpoint)
        if kind in SOURCED:
            raise CheckpointError(
                f"{checkpoint.name}: a model with heads on texts was expected, found an "
                "encoder-decoder model; compare it with `headport validate`"
            )
        if checkpoint.factory:
            raise CheckpointError(
                f"{checkpoint.name}: a transformers model was expected, whose hidden states are "
                "known; heads of a model that a function makes are proved by export alone"
            )
        self.tokenizer = load_tokenizer(checkpoint)
        self.model = load_model(checkpoint, torch.float32, kind)
        self._takes_cache = kind != "masked"
        given = [f.removeprefix(HEAD_FLAG) for f in flags if f.startswith(HEAD_FLAG)]
        requests = parse_heads(given)
        auto = next((request.name for request in requests if request.file is None), None)
        self._own = _own_answers(self.model, kind, auto)
        self._modules = _modules(checkpoint, requests, auto)
        names = (*self._own, *self._modules)
        rows = int(self.model.get_input_embeddings().weight.shape[0])
        facts = reference_facts(checkpoint, self.model, self.tokenizer, rows)
        labels = {name: _own_labels(self.model, kind) for name in self._own}
        labels |= {name: _labels(module) for name, module in self._modules.items()}
        self.ready = Ready(facts, None, "", 0, None, names, labels)

    @torch.no_grad()
    def ask(self, request: AskHeads) -> tuple[Answered, tuple[Float32, ...]]:
        """What every head says about a text: the announcement, and the arrays."""
        ids = torch.tensor([request.token_ids])
        logits, states = self._run(ids)
        found = {name: answer(ids[0], logits) for name, answer in self._own.items()}
        found |= {name: _asked(m, ids[0], states) for name, m in self._modules.items()}
        flat = [(head, name, t) for head, each in found.items() for name, t in each.items()]
        announced = Answered(tuple((head, name, tuple(t.shape)) for head, name, t in flat))
        return announced, tuple(np.ascontiguousarray(t.float().numpy()) for *_, t in flat)

    def _run(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model gives for a text [1, T], and the last hidden states [T, H]."""
        more: dict[str, Any] = {"use_cache": False} if self._takes_cache else {}
        output = run_reference(self.model, input_ids=ids, output_hidden_states=True, **more)
        return output.logits, output.hidden_states[-1][0].float()


_Own = Callable[[torch.Tensor, torch.Tensor], _Answers]  # ids [T], what the model gives


def _own_answers(model: Any, kind: str, auto: str | None) -> dict[str, _Own]:
    """The model's own head where it is no LM head, by its name in the bundle."""
    if kind == "masked":
        return {_MASKED: lambda _, logits: {"logits": logits[0]}}
    if kind not in ("sequence", "token"):
        return {}
    # [1, n] of a model that answers per text, [1, T, n] of one that does per token.
    if model.config.num_labels == 1:
        return {auto or _VALUE: lambda _, found: {"values": found.reshape(-1)}}
    return {auto or _LABELS: lambda _, found: {_LABELS: found.reshape(-1, found.shape[-1])}}


def _own_labels(model: Any, kind: str) -> dict[str, tuple[str, ...]]:
    """Task → names of its scores, in order, of the model's own head; empty of one without any."""
    config = model.config
    if kind == "masked" or config.num_labels == 1:
        return {}
    return {_LABELS: tuple(str(config.id2label.get(n, n)) for n in range(config.num_labels))}


def _labels(module: nn.Module) -> dict[str, tuple[str, ...]]:
    if not isinstance(module, MultiTaskHead):
        return {}
    return {task: tuple(map(str, names)) for task, names in module.config["tasks"].items()}


def _modules(
    checkpoint: Checkpoint, requests: tuple[HeadRequest, ...], auto: str | None
) -> dict[str, nn.Module]:
    """Heads of files, and the value head that the checkpoint holds beside the model."""
    found: dict[str, nn.Module] = {}
    held = value_head_in(checkpoint)
    if held is not None:
        found[auto or _VALUE] = held
    for request in requests:
        if request.file is not None:
            found[request.name] = load_head(request.file, allow_pickle=checkpoint.allow_pickle)
    return found


def _asked(module: nn.Module, ids: torch.Tensor, states: torch.Tensor) -> _Answers:
    """What a head says about hidden states [T, H] of tokens [T]."""
    match module:
        case ValueHead():
            return {"values": module(_pooled(module, ids, states))}
        case MultiTaskHead():
            pooled = _pooled(module, ids, states)
            return {task: module.scores(pooled, task) for task in module.config["tasks"]}
        case VocabularyHead():
            return {"logits": module(states)}
        case TreeSoftmax() | nn.AdaptiveLogSoftmaxWithLoss():
            return {"log_probs": module.log_prob(states)}
    raise CheckpointError(f"{type(module).__name__} is no head that is known")


def _pooled(
    module: ValueHead | MultiTaskHead, ids: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """States that a head is asked about: all, or that of the last token that is no padding."""
    if module.config["pooling"] == "none":
        return states
    pad_id = module.config["pad_id"]
    told = torch.arange(len(ids)) if pad_id is None else (ids != pad_id).nonzero().flatten()
    if not len(told):
        raise CheckpointError(f"a text of padding (token {pad_id}) alone has no last token")
    return states[told[-1:]]


def _answer(reference: HeadsReference, request: Request, writer: Writer) -> None:
    match request:
        case Encode(texts):
            ids = (tuple(reference.tokenizer(text)["input_ids"]) for text in texts)
            writer.put(Encoded(tuple(ids)))
        case AskHeads():
            writer.put(*reference.ask(request))


def main(arguments: list[str]) -> int:
    """Serve until stdin closes."""
    return serve(lambda: HeadsReference(*arguments), _answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
