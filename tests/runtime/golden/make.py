"""Makes `sampler.json`: what transformers does with rows of logits, for samplers in any language.

`python -m tests.runtime.golden.make` writes it anew. Scores are those of the processors and
warpers that `generate` itself assembles, in its order, on float64 rows; presence and
frequency penalties, which transformers lacks, follow the OpenAI API reference. Noise comes from
the reference sampler's Philox, written from the paper. Nothing of `headport.runtime` runs here.

    rows         a row of logits, its past and the limit of new tokens, where it counts → processed
                 scores, kept ids, drawn tokens; with no id kept, an error
    noise        (seed, step, sample, id) → 32 bits and g
    generations  a table of logits, a prompt → all new tokens, greedy or drawn
    beams        a table of logits, a prompt → replies and their scores

Numbers are shortest decimals; null stands for -inf, a banned token.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import transformers
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput

from headport.validate.reference_sampler import gumbel_noise, philox_blocks
from tests.runtime.beam_reference import FIELDS, until_end
from tests.runtime.golden import FILE
from tests.runtime.golden.cases import EOS, FILTERS, FORCED, PAST, RULES, SIZE

__all__ = ["make"]


KEYS = ((7, 0, 0), (2**64 - 1, 5, 2))

OURS = ("presence_penalty", "frequency_penalty")


class TableConfig(PreTrainedConfig):
    """A vocabulary and no layers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.vocab_size = SIZE
        self.num_hidden_layers = 1
        self.hidden_size = 1
        self.num_attention_heads = 1


class TableModel(PreTrainedModel, GenerationMixin):
    """Logits after a token are a row of a table, so that its samplers can be run anywhere."""

    config_class = TableConfig

    def __init__(self, config: TableConfig, table: np.ndarray) -> None:
        super().__init__(config)
        self.table = torch.nn.Parameter(torch.from_numpy(table), requires_grad=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.table[input_ids])

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}


def short(values: Any) -> Any:
    """Shortest decimals; -inf becomes null."""
    array = np.asarray(values)
    return [None if v == -np.inf else float(str(v)) for v in array]


def _config(options: dict[str, Any], **more: Any) -> GenerationConfig:
    known = {FIELDS.get(k, k): v for k, v in options.items() if k not in (*OURS, "allowed")}
    sampled = "temperature" in options
    settings = {"num_beams": 1, "num_return_sequences": 1, "use_cache": False}
    settings |= {"top_k": 0} if sampled else {}
    settings |= known | more
    return GenerationConfig(do_sample=sampled, eos_token_id=EOS, pad_token_id=0, **settings)


def _chain(model: TableModel, options: dict[str, Any], past: dict[str, Any]) -> tuple[Any, Any]:
    """What `generate` would apply: processors, and warpers behind them."""
    length = len(past["prompt"])
    more = {"max_length": length + past["limit"]} if "limit" in past else {}
    config = _config(options, **more)
    model._prepare_special_tokens(config, False, device="cpu")
    allowed = options.get("allowed")
    chain = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=length,
        prefix_allowed_tokens_fn=(lambda _, __: allowed) if allowed else None,
        device="cpu",
    )
    warpers = [p for p in chain if type(p).__name__.endswith("Warper")]
    return [p for p in chain if p not in warpers], warpers


def _penalised(scores: torch.Tensor, options: dict[str, Any], tokens: list[int]) -> torch.Tensor:
    """mu[j] - c[j] · frequency - (c[j] > 0) · presence, over the reply."""
    counts = torch.bincount(torch.tensor(tokens, dtype=torch.long), minlength=SIZE)
    frequency, presence = (options.get(name, 0.0) for name in reversed(OURS))
    return scores - counts * frequency - (counts > 0) * presence


def _scores(
    model: TableModel, logits: torch.Tensor, options: dict[str, Any], past: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Processed scores, and what the warpers make of them; [V] each."""
    ids = torch.tensor([past["prompt"] + past["tokens"]])
    processors, warpers = _chain(model, options, past)
    scores, penalised = logits[None], False
    for processor in processors:
        # Presence and frequency stand behind bias and repetition, before everything else.
        early = type(processor).__name__ in (
            "SequenceBiasLogitsProcessor",
            "RepetitionPenaltyLogitsProcessor",
        )
        if not early and not penalised:
            scores, penalised = _penalised(scores, options, past["tokens"]), True
        scores = processor(ids, scores)
    if not penalised:
        scores = _penalised(scores, options, past["tokens"])
    warped = scores
    for warper in warpers:
        warped = warper(ids, warped)
    return scores[0], warped[0]


def _draw(warped: torch.Tensor, key: tuple[int, int, int]) -> int:
    seed, step, sample = key
    scores = warped.double().numpy() + gumbel_noise(SIZE, step, sample, seed)
    best, second = np.sort(scores)[[-1, -2]]
    assert best - second > 1e-6 or second == -np.inf, "a draw must not hang on rounding"
    return int(np.argmax(scores))


def _row(
    model: TableModel, name: str, logits: np.ndarray, options: dict[str, Any], past: dict[str, Any]
) -> dict[str, Any]:
    exact, warped = _scores(model, torch.from_numpy(logits).double(), options, past)
    _, usual = _scores(model, torch.from_numpy(logits), options, past)
    kept = torch.isfinite(warped).nonzero()[:, 0].tolist()
    assert kept == torch.isfinite(usual).nonzero()[:, 0].tolist(), f"{name} hangs on rounding"
    found = {"name": name, "options": options, **past, "eos": EOS, "logits": short(logits)}
    found |= {"scores": short(exact.float().numpy()), "kept": kept}
    if "temperature" in options:
        found["draws"] = [[*key, _draw(warped, key)] for key in KEYS]
    elif kept:
        found["greedy"] = int(torch.argmax(exact))
    return found


def _rows(model: TableModel) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    found = []
    for name, options, past in RULES:
        logits = (rng.normal(size=SIZE) * 3).astype(np.float32)
        found.append(_row(model, name, logits, options, past))
    for name, options in FILTERS:
        for spread in (1, 4):
            logits = (rng.normal(size=SIZE) * spread).astype(np.float32)
            found.append(_row(model, name, logits, options, PAST))
    ties = rng.integers(0, 5, SIZE).astype(np.float32)
    for name, options in (
        ("ties, greedy", {}),
        ("ties at the k-th place", {"temperature": 1.0, "top_k": 6}),
        ("ties of typical-p", {"temperature": 1.0, "typical_p": 0.4}),
        ("ties of min-p", {"temperature": 1.0, "min_p": 0.3}),
        ("ties at the top, epsilon", {"temperature": 1.0, "epsilon_cutoff": 0.5}),
    ):
        found.append(_row(model, name, ties, options, PAST))
    for name, options, past in FORCED:
        logits = (rng.normal(size=SIZE) * 3).astype(np.float32)
        found.append(_row(model, name, logits, options, past))
    return found


def _noise() -> list[dict[str, Any]]:
    found = []
    for seed, step, sample in ((0, 0, 0), (7, 3, 0), (2**64 - 1, 2**31, 5)):
        for token_id in (0, 1, 7, 8, 257, 49151):
            block = philox_blocks(np.array([token_id // 8], np.uint64), step, sample, seed)[0]
            word = int(block[token_id % 8 // 2])
            bits = word >> 32 if token_id % 2 else word & 0xFFFFFFFF
            g = gumbel_noise(token_id + 1, step, sample, seed)[token_id]
            found.append(
                {
                    "seed": seed,
                    "step": step,
                    "sample": sample,
                    "id": token_id,
                    "bits": bits,
                    "g": float(g),
                }
            )
    return found


def _loop(
    model: TableModel, options: dict[str, Any], prompt: list[int], limit: int, seed: int
) -> list[int]:
    """Tokens drawn one after the other, to an end token or the limit."""
    tokens: list[int] = []
    while len(tokens) < limit and not (tokens and tokens[-1] in EOS):
        last = (prompt + tokens)[-1]
        past = {"prompt": prompt, "tokens": tokens}
        _, warped = _scores(model, model.table[last].double(), options, past)
        tokens.append(_draw(warped, (seed, len(tokens), 0)))
    return tokens


def _generations(model: TableModel) -> list[dict[str, Any]]:
    greedy: tuple[dict[str, Any], ...] = (
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 7},
        {"bad_words": [[5], [20, 21]], "begin_suppress_tokens": [8, 11]},
        {"logit_bias": [[[3], 2.0]], "suppress_tokens": [17]},
    )
    found = []
    for options in greedy:
        for prompt in ([4, 9], [12]):
            out = model.generate(
                torch.tensor([prompt]), generation_config=_config(options, max_new_tokens=12)
            )
            tokens = out[0, len(prompt) :].tolist()
            found.append(
                {"options": options, "prompt": prompt, "eos": EOS, "limit": 12, "tokens": tokens}
            )
    for options in (
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 6, "repetition_penalty": 1.2},
        {"temperature": 1.3, "top_p": 0.8, "presence_penalty": 1.0, "min_new_tokens": 6},
        {"temperature": 1.0, "typical_p": 0.7, "no_repeat_ngram_size": 1},
    ):
        tokens = _loop(model, options, [4, 9], 12, seed=11)
        found.append(
            {
                "options": options,
                "prompt": [4, 9],
                "eos": EOS,
                "limit": 12,
                "seed": 11,
                "tokens": tokens,
            }
        )
    return found


def _beams(model: TableModel) -> list[dict[str, Any]]:
    found = []
    for beams in (2, 4):
        for penalty in (-1.0, 0.0, 1.0, 2.0):
            for early in (False, True, "never"):
                settings = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}
                config = _config(
                    {},
                    max_new_tokens=7,
                    num_return_sequences=beams,
                    output_scores=True,
                    return_dict_in_generate=True,
                    **settings,
                )
                out = model.generate(torch.tensor([[4, 9]]), generation_config=config)
                replies = [until_end(row, EOS) for row in out.sequences[:, 2:].tolist()]
                scores = short(out.sequences_scores.numpy())
                found.append(
                    {
                        **settings,
                        "prompt": [4, 9],
                        "eos": EOS,
                        "limit": 7,
                        "replies": replies,
                        "scores": scores,
                    }
                )
    return found


def make() -> dict[str, Any]:
    """All vectors."""
    table = (np.random.default_rng(1).normal(size=(SIZE, SIZE)) * 2).astype(np.float32)
    with torch.no_grad():
        model = TableModel(TableConfig(), table).eval()
        return {
            "made_with": {"transformers": transformers.__version__},
            "table": [short(row) for row in table],
            "rows": _rows(model),
            "noise": _noise(),
            "generations": _generations(model),
            "beams": _beams(model),
        }


if __name__ == "__main__":
    parts = {
        name: [json.dumps(each) for each in value] if isinstance(value, list) else json.dumps(value)
        for name, value in make().items()
    }
    lines = [
        f'"{name}": ' + (value if isinstance(value, str) else "[\n" + ",\n".join(value) + "\n]")
        for name, value in parts.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
