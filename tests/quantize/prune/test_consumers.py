"""Pruned bundles in the hands of everything that takes a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from headport.bundle import Bundle
from headport.errors import MergeError, UsageError
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize import Options as QuantizeOptions
from headport.quantize import quantize
from headport.quantize.prune import Options, prune
from headport.runtime import Generator
from tests.quantize.prune.tokenizers_of import KINDS, byte_level
from tests.quantize.prune.toys import count_texts, write_bundle

PROMPT = "The patient's heart"
MODES = ("output", "both")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("toy") / "bundle", byte_level())


@pytest.fixture(scope="module")
def small(toy: Bundle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    return {mode: _prune(toy, tmp_path_factory.mktemp(mode), mode) for mode in MODES}


def _prune(source: Bundle, folder: Path, mode: Any) -> Bundle:
    counts = count_texts(folder / "counts.parquet", source)
    output = folder / "small"
    return prune(Options(bundle=source.path, output=output, counts=counts, least=1, mode=mode))


def _certified(source: Bundle, folder: Path) -> Bundle:
    options: dict[str, Any] = {"head": "int8", "block": 16, "rescore": 12, "certify": True}
    return quantize(QuantizeOptions(bundle=source.path, output=folder / "certified", **options))


def _original(bundle: Bundle, ids: list[int]) -> list[int]:
    file = bundle.manifest.vocabulary.checkpoint_ids
    return ids if file is None else np.load(bundle.path / file)[ids].tolist()


def test_with_the_same_noise_both_models_choose_alike_until_a_removed_token_wins(
    toy: Bundle, small: dict[str, Bundle]
) -> None:
    full, cut = Generator(toy.path), Generator(small["output"].path)
    kept = set(np.load(small["output"].path / "vocab_map.npy").tolist())
    alike = others = 0
    for seed in range(60):
        options: dict[str, Any] = {"max_new_tokens": 1, "temperature": 1.5, "seed": seed}
        [expected] = full.generate(PROMPT, **options)[0].token_ids
        [found] = cut.generate(PROMPT, **options)[0].token_ids
        assert found in kept
        if expected in kept:
            assert found == expected
            alike += 1
        else:
            others += 1
    assert alike > 20 and others > 2


@pytest.mark.parametrize(("first", "mode"), [("prune", "output"), ("quantise", "both")])
def test_a_certified_head_stays_exact_pruned_before_or_after(
    toy: Bundle, small: dict[str, Bundle], tmp_path: Path, first: str, mode: str
) -> None:
    plain = small[mode]
    if first == "prune":
        bundle = _certified(plain, tmp_path)
    else:
        bundle = _prune(_certified(toy, tmp_path), tmp_path, mode)
    lowered = lower(LowerOptions(bundle=bundle.path, output=tmp_path / "cpu", target="ort-cpu"))
    expected = Generator(plain.path)
    for each in (bundle, lowered):
        exact = Generator(each.path)
        assert exact.exact
        for options in (
            {"temperature": 0.0},
            {"temperature": 1.2, "seed": 5},
            {"temperature": 1.0, "top_k": 7, "seed": 6},
            {"temperature": 1.0, "top_p": 0.9, "seed": 7},
            {"temperature": 1.0, "min_p": 0.02, "seed": 8},
        ):
            asked: dict[str, Any] = {"max_new_tokens": 6, **options}
            wanted = expected.generate(PROMPT, **asked)[0].token_ids
            assert exact.generate(PROMPT, **asked)[0].token_ids == wanted


def test_requests_name_original_ids(toy: Bundle, small: dict[str, Bundle]) -> None:
    cut = Generator(small["output"].path)
    free = cut.generate(PROMPT, max_new_tokens=4)[0].token_ids
    [stopped] = cut.generate(PROMPT, max_new_tokens=4, eos_token_id=free[1])
    assert stopped.token_ids == free[:2] and stopped.finish_reason == "eos"
    kept = np.load(small["output"].path / "vocab_map.npy")
    removed = next(i for i in range(toy.manifest.vocabulary.size) if i not in kept)
    [score] = cut.score([[free[0], removed, free[1]]])
    assert np.isposinf(score.nll[1]) and np.isfinite(score.nll[2])


def _requests(kept: np.ndarray) -> list[dict[str, Any]]:
    """One request for every option that names tokens or looks at those before.

    Beams are left out: they add up probabilities, which a pruned head shares among fewer tokens.
    """
    some = [int(i) for i in kept[-60:]]
    sampled: dict[str, Any] = {"temperature": 1.3, "seed": 11}
    return [
        sampled | {"top_k": 9, "repetition_penalty": 1.4},
        sampled | {"top_p": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.3},
        sampled | {"min_p": 0.02, "typical_p": 0.9, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3},
        {"no_repeat_ngram_size": 1, "suppress_tokens": some[:40]},
        {"bad_words": [[some[0]], some[1:3]], "begin_suppress_tokens": some},
        {"logit_bias": {some[0]: 25.0, 3: 1.0}, "eos_token_id": some[0], "min_new_tokens": 3},
        {"logprobs": 4},
    ]


@pytest.mark.parametrize("certified", [False, True])
def test_a_pruned_head_is_the_whole_one_restricted_to_its_tokens(
    toy: Bundle, small: dict[str, Bundle], tmp_path: Path, certified: bool
) -> None:
    cut = small["output"]
    kept = np.load(cut.path / "vocab_map.npy")
    runs = Generator(toy.path), Generator((_certified(cut, tmp_path) if certified else cut).path)
    for request in _requests(kept):
        wanted = runs[0].generate(PROMPT, max_new_tokens=5, allowed=kept.tolist(), **request)
        found = runs[1].generate(PROMPT, max_new_tokens=5, **request)
        assert [each.token_ids for each in found] == [each.token_ids for each in wanted], request


@pytest.mark.parametrize("kind", KINDS)
def test_auto_tokenizer_loads_the_bundle(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    source = write_bundle(tmp_path / "toy", KINDS[kind](), chat=None)
    bundle = _prune(source, tmp_path, "both")
    loaded = AutoTokenizer.from_pretrained(bundle.path, local_files_only=True)
    fast = Tokenizer.from_file(str(bundle.path / "tokenizer.json"))
    assert len(loaded) == bundle.manifest.vocabulary.size
    for text in ("The heart pumps blood", "def f(x):\n    return x", "心臟 🙂 naïve", ""):
        assert loaded(text)["input_ids"] == fast.encode(text).ids
        ids = fast.encode(text, add_special_tokens=False).ids
        assert loaded.decode(ids, clean_up_tokenization_spaces=False) == fast.decode(
            ids, skip_special_tokens=False
        )


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama whose matrix is wider than its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    from headport.export.command import Options as ExportOptions
    from headport.export.command import export

    folder = tmp_path_factory.mktemp("model")
    inner = byte_level()
    stop = inner.token_to_id("<|stop|>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=inner.get_vocab_size() + 13,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=inner.token_to_id("<|pad|>"),
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "llama")
    PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|stop|>", pad_token="<|pad|>"
    ).save_pretrained(folder / "llama")
    return export(ExportOptions(model=str(folder / "llama"), output=folder / "bundle")).path


def test_a_real_graph_in_both_modes(exported: Path, tmp_path: Path) -> None:
    from headport.merge.command import Options as MergeOptions
    from headport.merge.command import merge

    source = Bundle.open(exported)
    output, both = (_prune(source, tmp_path / mode, mode) for mode in MODES)
    for bundle in (output, both):
        check = bundle.manifest.provenance.stages[-1].report["check"]
        assert check["logits_bit_equal"] and check["hidden_states_bit_equal"]
    replies = [
        _original(bundle, Generator(bundle.path).generate(PROMPT, max_new_tokens=8)[0].token_ids)
        for bundle in (output, both)
    ]
    assert both.manifest.heads["lm"].tied and not output.manifest.heads["lm"].tied
    matrices = [t for t in both.manifest.tensors if t.shape == (both.manifest.vocabulary.size, 32)]
    assert len(matrices) == 1
    # Its prompt may be split otherwise; here every token of it is kept.
    assert replies[0] == replies[1]
    config = json.loads((both.path / "config.json").read_text())
    stop = Tokenizer.from_file(str(both.path / "tokenizer.json")).token_to_id("<|stop|>")
    assert config["vocab_size"] == both.manifest.vocabulary.size and config["eos_token_id"] == stop
    lowered = lower(LowerOptions(bundle=both.path, output=tmp_path / "cpu", target="ort-cpu"))
    found = Generator(lowered.path).generate(PROMPT, max_new_tokens=8)[0].token_ids
    assert _original(both, found) == replies[0]
    merge(MergeOptions(bundle=both.path, output=tmp_path / "merged"))
    with pytest.raises(MergeError, match="its vocabulary is pruned"):
        merge(MergeOptions(bundle=output.path, output=tmp_path / "not"))


@pytest.mark.parametrize("mode", MODES)
def test_comparing_with_the_whole_model_is_refused_at_once(
    small: dict[str, Bundle], tmp_path: Path, mode: str
) -> None:
    from headport.validate.command import Options as ValidateOptions
    from headport.validate.command import validate

    (tmp_path / "text.txt").write_text("The heart pumps blood.\n")
    texts = (tmp_path / "text.txt",)
    options = ValidateOptions(bundle=small[mode].path, reference=str(tmp_path), text=texts)
    with pytest.raises(UsageError, match=r"is pruned, .* let `headport price` say"):
        validate(options)
