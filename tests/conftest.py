"""Tiny random checkpoints and the bundles made from them, shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401 (its plugin fails when it is first imported after transformers)
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Each worker of pytest-xdist keeps to one CPU: sessions and torch size their thread pools by what
# they may use, and two pools on every CPU spend their time waiting for each other.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if _WORKER and hasattr(os, "sched_setaffinity"):
    _CPUS = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_CPUS[int(_WORKER.removeprefix("gw")) % len(_CPUS)]})

VOCAB_SIZE = 257  # prime
TEXTS = (
    "The head is the last matrix of a language model.",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "Quantisation rounds weights; a proof says how far the answers moved.",
    "naïve café, 中文 and emoji 🙂",
)


def save_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """A byte-level BPE tokenizer with two special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", pad_token="<|end|>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    tokenizer.save_pretrained(folder)


def save_model(folder: Path, config: Any, seed: int = 0) -> Path:
    """A random model with weights large enough that every part of it shows in the logits."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 1.0)
    model.save_pretrained(folder)
    (folder / "LICENSE").write_text("Licence of the tiny test weights: do as you like.\n")
    save_tokenizer(folder)
    return folder


def llama_config(**changes: Any) -> Any:
    """T0 of the test models: two layers, grouped queries, prime vocabulary."""
    from transformers import LlamaConfig

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return LlamaConfig(**(settings | changes))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied Llama checkpoint."""
    return save_model(tmp_path_factory.mktemp("checkpoint") / "llama", llama_config())


@pytest.fixture(scope="session")
def tiny_llama_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied Llama checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint") / "llama-tied"
    return save_model(folder, llama_config(tie_word_embeddings=True))


@pytest.fixture(scope="session")
def tiny_gemma2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 2 checkpoint: softcap on attention and logits, mixed window, tied, scaled embedding."""
    from transformers import Gemma2Config

    config = Gemma2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
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
    return save_model(tmp_path_factory.mktemp("checkpoint") / "gemma2", config)


@pytest.fixture(scope="session")
def tiny_bundle(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Portable fp32 bundle of `tiny_llama`."""
    from headport.export.command import Options, export

    output = tmp_path_factory.mktemp("bundle") / "llama"
    return export(Options(model=str(tiny_llama), output=output)).path


@pytest.fixture(scope="session")
def tiny_lowered(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_bundle` lowered to ort-cpu."""
    from headport.lowering.command import Options, lower

    output = tmp_path_factory.mktemp("bundle") / "llama-ort-cpu"
    return lower(Options(bundle=tiny_bundle, output=output, target="ort-cpu")).path


@pytest.fixture(scope="session")
def conditioned_bundle(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_llama` with conditions of 5 values, `formal` and `casual` among them.

    `style.safetensors` beside it is what it was exported with.
    """
    import torch

    from headport.export.command import Options, export
    from headport.export.heads import ConditionProjection, save_condition

    folder = tmp_path_factory.mktemp("conditions")
    torch.manual_seed(3)
    made = ConditionProjection(5, 64)
    with torch.no_grad():
        made.linear.weight.normal_(0.0, 1.0)
    fixed = {"formal": torch.tensor([1.0, 0, 0, 2, 0]), "casual": torch.tensor([0.0, 3, 0, 0, 1])}
    file = folder / "style.safetensors"
    save_condition(made, file, fixed)
    return export(Options(model=str(tiny_llama), output=folder / "bundle", condition=file)).path


@pytest.fixture(scope="session")
def headed_bundle(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_llama` with one head of each kind of `tests.head_models` beside its own."""
    from headport.export.command import Options, export
    from tests.head_models import head_modules, save_modules

    folder = tmp_path_factory.mktemp("heads")
    heads = tuple(save_modules(folder, head_modules()))
    return export(Options(model=str(tiny_llama), output=folder / "bundle", head=heads)).path
