"""The model `headport` of lm-evaluation-harness: a bundle as it runs.

Requests are tokenised, cut and scored as the harness's own `hf` model does it, so that the two
give the same figures for the same model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from headport.errors import UsageError
from headport.progress import bar
from headport.runtime import Generator
from headport.runtime.chat import chat_text
from headport.runtime.text import Tokens

__all__ = ["HeadportModel"]

Float64 = npt.NDArray[np.float64]

_MAX_NEW_TOKENS = 256  # as `hf` has it, where a task names no number
# generation arguments of a task → options of `Generator.generate`
_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "num_beams": "num_beams",
    "length_penalty": "length_penalty",
}
_Tokenised = tuple[tuple[str, str], list[int], list[int]]


@register_model("headport")
class HeadportModel(TemplateLM):  # type: ignore[misc]
    """A bundle.

    Args:
        bundle: Its folder.
        batch_size: Texts that are generated together; figures do not depend on it.
        threads: ONNX Runtime's threads; 0: one per core.
        max_length: Tokens that a text may have; 0: the bundle's context.
        seed: Of sampling tasks.
        provider: cpu, cuda or auto.
        **ignored: What the harness passes to every model: device, max_batch_size.
    """

    def __init__(
        self,
        bundle: str,
        *,
        batch_size: int | str = 1,
        threads: int = 0,
        max_length: int = 0,
        seed: int = 0,
        provider: str = "auto",
        **ignored: Any,
    ) -> None:
        super().__init__()
        unknown = sorted(ignored.keys() - {"device", "max_batch_size"})
        if unknown:
            raise UsageError(
                f"model_args: bundle, batch_size, threads, max_length, seed or provider was "
                f"expected, {', '.join(unknown)} given"
            )
        self._generator = Generator(
            bundle,
            threads=int(threads),
            provider=provider,
            max_context=int(max_length),
        )
        self._tokens = Tokens(self._generator.bundle)
        self._batch_size = 1 if batch_size == "auto" else int(batch_size)
        self._seed = int(seed)

    @property
    def max_length(self) -> int:
        """Tokens that a text may have."""
        return self._generator.max_context

    @property
    def max_gen_toks(self) -> int:
        """New tokens of a reply where a task names no number."""
        return _MAX_NEW_TOKENS

    @property
    def batch_size(self) -> int:
        """Texts that are generated together."""
        return self._batch_size

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._special("eos_token")

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it: BOS, else EOS."""
        named = "bos_token" in self._tokens.special_tokens
        return self._special("bos_token") if named else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's caches."""
        return self._generator.bundle.manifest.provenance.checkpoint.replace("/", "__")

    def _text_of(self, name: str) -> str:
        text = self._tokens.special_tokens.get(name)
        if text is None:
            raise UsageError(
                f"{self._generator.bundle.path}: the harness needs the tokenizer's {name}, "
                "tokenizer_config.json names none; name it there and export again"
            )
        return text

    def _special(self, name: str) -> int:
        ids = self._tokens.encode(self._text_of(name), add_special_tokens=False)
        if len(ids) != 1:
            raise UsageError(
                f"{self._generator.bundle.path}: the harness needs the tokenizer's {name}, one "
                f"token; {len(ids)} found"
            )
        return ids[0]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_more: Any
    ) -> list[int]:
        """Token ids; special tokens as the tokenizer adds them, unless the text begins with BOS."""
        if add_special_tokens is None:
            first = self._tokens.special_tokens.get(
                "bos_token", self._tokens.special_tokens.get("eos_token")
            )
            add_special_tokens = not (first and string.startswith(first))
        return self._tokens.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[_Tokenised], disable_tqdm: bool = False, **_more: Any
    ) -> list[tuple[float, bool]]:
        """Σ ln p of each continuation, and whether greedy decoding would give it.

        Choices after one context differ in their last tokens: requests with the same input tokens
        are computed once.
        """
        del disable_tqdm
        order = sorted(range(len(requests)), key=lambda at: _input(requests[at], self.max_length))
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        last: tuple[int, ...] = ()
        logits = np.zeros((0, 0), np.float32)
        with bar(len(requests), "loglikelihood", "text") as progress:
            for at in order:
                texts, _, continuation = requests[at]
                fed = _input(requests[at], self.max_length)
                if fed != last:
                    logits, last = self._generator.logits(fed), fed
                found[at] = _likelihood(logits[-len(continuation) :], continuation)
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, found[at])
                progress.update(1)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Σ ln p of whole texts, in the harness's own windows."""
        totals = []
        for request in requests:
            (text,) = request.args
            windows = [
                utils.make_disjoint_window(pair)
                for pair in utils.get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            parts = self._loglikelihood_tokens(
                [(None, *window) for window in windows],
                disable_tqdm=disable_tqdm,
            )
            totals.append(sum(value for value, _ in parts))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Replies up to a stop text, the end token, or the task's number of tokens.

        Raises:
            UsageError: If a task asks for a generation argument that has no counterpart here.
        """
        del disable_tqdm
        found = []
        with bar(len(requests), "generate", "text") as progress:
            for start in range(0, len(requests), self._batch_size):
                batch = requests[start : start + self._batch_size]
                # Rows have options of their own only one by one.
                groups = [batch] if _alike(batch) else [[request] for request in batch]
                for group in groups:
                    found += self._replies(group)
                    progress.update(len(group))
        return found

    def _replies(self, group: Sequence[Instance]) -> list[str]:
        given = dict(group[0].args[1])
        options = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        end = self._text_of("eos_token")
        until = handle_stop_sequences(options.pop("until", None), eos=end)
        new_tokens = options.pop("max_gen_toks")
        if not 0 < new_tokens < self.max_length:
            raise UsageError(
                f"max_gen_toks: 1 to {self.max_length - 1} expected, so that a prompt fits "
                f"before the reply, {new_tokens} given"
            )
        prompts = [
            self.tok_encode(request.args[0])[-(self.max_length - new_tokens) :] for request in group
        ]
        replies = self._generator.generate(
            prompts,
            max_new_tokens=new_tokens,
            stop=[text for text in until if text and text != end],
            **_options(options, self._seed),
        )
        texts = []
        for request, reply in zip(group, replies, strict=True):
            texts.append(postprocess_generated_text(reply.text, until, None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the bundle's chat template writes it."""
        if not add_generation_prompt:
            raise UsageError(
                "a chat whose last message is to be continued is not supported; leave out "
                "--fewshot_as_multiturn with a prefilled reply"
            )
        variables = {"add_generation_prompt": True}
        return chat_text(self._generator.bundle, self._tokens, chat_history, variables)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The bundle's template as text, for the harness's records."""
        file = self._generator.bundle.path / "chat_template.jinja"
        if isinstance(chat_template, str):
            raise UsageError(
                f"--apply_chat_template: a bundle has one template, {chat_template!r} was asked for"
            )
        return file.read_text(encoding="utf-8") if chat_template and file.exists() else None

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        manifest = self._generator.bundle.manifest
        return {
            "model_bundle": str(self._generator.bundle.path),
            "model_sha": manifest.provenance.sha256,
            "model_dtype": manifest.model.dtype,
            "model_target": manifest.target,
        }


def _input(request: _Tokenised, max_length: int) -> tuple[int, ...]:
    """Tokens that are fed: context and continuation but its last, cut from the left."""
    _, context, continuation = request
    return tuple([*context, *continuation][-(max_length + 1) :][:-1])


def _likelihood(logits: npt.NDArray[np.float32], continuation: list[int]) -> tuple[float, bool]:
    """Σ ln p of tokens [C] under logits [C, V]; whether each is the first choice."""
    z = logits.astype(np.float64)
    top = z.max(axis=1)
    totals: Float64 = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    chosen = z[np.arange(len(continuation)), continuation]
    greedy = bool((logits.argmax(axis=1) == np.asarray(continuation)).all())
    return float((chosen - totals).sum()), greedy


def _alike(batch: Sequence[Instance]) -> bool:
    return all(request.args[1] == batch[0].args[1] for request in batch)


def _options(given: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Options of the generator for what a task asks for."""
    asked = {key: value for key, value in given.items() if key != "do_sample"}
    unknown = sorted(asked.keys() - _OPTIONS.keys())
    if unknown:
        raise UsageError(
            f"generation arguments: {', '.join(_OPTIONS)}, do_sample, until or max_gen_toks "
            f"expected, {', '.join(unknown)} found"
        )
    options = {_OPTIONS[key]: value for key, value in asked.items()}
    if not given.get("do_sample"):
        options["temperature"] = 0.0
    return {"temperature": 0.0, "seed": seed, **options}
