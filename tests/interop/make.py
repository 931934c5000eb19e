"""Merged models and headport's own answers, for `tests/interop/check.py` to compare with.

    python -m tests.interop.make FOLDER [--bundle BUNDLE]

Runs in headport's environment; `check.py` runs in one with the other runtimes and without headport.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from headport.export.command import Options as ExportOptions
from headport.export.command import export
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.merge import Options, merge
from headport.quantize.command import Options as QuantizeOptions
from headport.quantize.command import quantize
from headport.runtime import Generator
from tests.conftest import TEXTS, llama_config, save_model
from tests.merge.layouts import use_fusible_layout

NEW_TOKENS = 16
PROMPT_LENGTHS = (11, 2, 7, 1)


@dataclass(frozen=True)
class Model:
    """A bundle to merge: for whom, and whether its head's layout is changed afterwards."""

    name: str
    bundle: Path
    runtime: str
    fusible: bool = False


def gemma2_config(key_heads: int) -> Any:
    """Softcaps on attention and logits, a window of 8 tokens on every other layer."""
    from transformers import Gemma2Config

    return Gemma2Config(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        head_dim=16,
        max_position_embeddings=64,
        sliding_window=8,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=1.0,
        query_pre_attn_scalar=16,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def mistral_config() -> Any:
    """Grouped queries and a window of 8 tokens on every layer."""
    from transformers import MistralConfig

    shape = llama_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    return MistralConfig(
        **{name: shape[name] for name in names},
        sliding_window=8,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def gpt2_config() -> Any:
    """Learned positions: a shift by the padding would show."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=257,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def tiny_models(folder: Path) -> Iterator[Model]:
    """Random models of a few layers and what quantising and lowering makes of one."""
    configs = {
        "llama": llama_config(),
        "mistral, window": mistral_config(),
        "gemma2, window, softcap": gemma2_config(4),
        "gemma2, grouped": gemma2_config(2),
        "gpt2": gpt2_config(),
    }
    bundles = {}
    for name, config in configs.items():
        checkpoint = save_model(folder / "checkpoints" / name, config)
        output = folder / "bundles" / name
        bundles[name] = export(ExportOptions(model=str(checkpoint), output=output)).path
        yield Model(name, bundles[name], "genai" if name == "gemma2, grouped" else "both")
    for name in ("llama", "gpt2"):
        yield Model(f"{name}, position_ids", bundles[name], "optimum")
    half = folder / "bundles" / "llama, fp16"
    options = ExportOptions(model=str(folder / "checkpoints" / "llama"), output=half, dtype="fp16")
    yield Model(half.name, export(options).path, "both")
    yield from _lowered(folder, "gemma2, window, softcap", bundles["gemma2, window, softcap"])
    yield from _variants(folder, "llama", bundles["llama"])


def _lowered(folder: Path, name: str, bundle: Path) -> Iterator[Model]:
    output = folder / "bundles" / f"{name}, ort-cpu"
    lowered = lower(LowerOptions(bundle=bundle, output=output, target="ort-cpu"))
    yield Model(output.name, lowered.path, "genai")


def _variants(folder: Path, name: str, bundle: Path) -> Iterator[Model]:
    yield from _lowered(folder, name, bundle)
    output = folder / "bundles" / f"{name}, int8"
    int8 = quantize(QuantizeOptions(bundle=bundle, output=output, head="int8", block=32)).path
    yield Model(int8.name, int8, "both")
    yield Model(f"{int8.name}, fusible layout", int8, "both", fusible=True)
    yield from _lowered(folder, int8.name, int8)
    output = folder / "bundles" / f"{name}, int8 throughout"
    options = QuantizeOptions(bundle=bundle, output=output, head="int8", backbone="int8")
    throughout = quantize(options).path
    yield Model(throughout.name, throughout, "both")
    yield from _lowered(folder, throughout.name, throughout)
    output = folder / "bundles" / f"{name}, certified"
    options = QuantizeOptions(bundle=bundle, output=output, head="int8", rescore=16, certify=True)
    yield Model(output.name, quantize(options).path, "both")


def given_models(folder: Path, bundle: Path) -> Iterator[Model]:
    """A user's portable bundle: as it is, with an INT8 head, and that lowered."""
    name = bundle.name
    yield Model(name, bundle, "both")
    output = folder / "bundles" / f"{name}, int8"
    int8 = quantize(QuantizeOptions(bundle=bundle, output=output, head="int8")).path
    yield Model(int8.name, int8, "both")
    yield from _lowered(folder, int8.name, int8)


def prompts_of(bundle: Path, texts: tuple[str, ...]) -> list[list[int]]:
    """Texts as ids, or ragged random ids where there are no texts; none is the padding token."""
    if texts:
        tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
        return [tokenizer.encode(text).ids for text in texts]
    rng = np.random.default_rng(3)
    return [rng.integers(1, 257, n).tolist() for n in PROMPT_LENGTHS]


def answer(model: Model, folder: Path, texts: tuple[str, ...]) -> dict[str, Any]:
    """Merge one model and generate with its bundle."""
    merged = folder / "merged" / model.name
    report = merge(Options(bundle=model.bundle, output=merged, runtime=model.runtime))
    if model.fusible:
        use_fusible_layout(merged / "model.onnx")
    prompts = prompts_of(model.bundle, texts)
    generator = Generator(model.bundle)
    found = [generator.generate([p], max_new_tokens=NEW_TOKENS, temperature=0)[0] for p in prompts]
    np.save(folder / "merged" / f"{model.name}.npy", generator.logits(prompts[0]))
    config = json.loads((model.bundle / "config.json").read_text("utf-8"))
    pad = config.get("pad_token_id")
    eos = json.loads((model.bundle / "manifest.json").read_text("utf-8"))["defaults"]
    return {
        "runtimes": list(report.runtimes),
        "fusible": model.fusible,
        "prompts": prompts,
        "ids": [list(map(int, each.token_ids)) for each in found],
        "texts": {text: prompts_of(model.bundle, (text,))[0] for text in TEXTS},
        "eos": eos.get("eos_token_id", config.get("eos_token_id")),
        "pad": 0 if pad is None else pad,
        "new_tokens": NEW_TOKENS,
    }


def main() -> None:
    """Write merged models, and `answers.json` beside them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bundle", type=Path, help="a portable bundle, instead of tiny models")
    given = parser.parse_args()
    shutil.rmtree(given.folder, ignore_errors=True)
    (given.folder / "merged").mkdir(parents=True)
    models = given_models(given.folder, given.bundle) if given.bundle else tiny_models(given.folder)
    texts = TEXTS if given.bundle else ()
    answers = {model.name: answer(model, given.folder, texts) for model in models}
    text = json.dumps(answers, indent=1, ensure_ascii=False)
    (given.folder / "answers.json").write_text(text, encoding="utf-8")
    print(f"{given.folder}: {len(answers)} merged models")


if __name__ == "__main__":
    main()
