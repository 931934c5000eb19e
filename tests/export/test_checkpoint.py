"""A checkpoint is found, hashed and loaded whole, or refused with one line that says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headport.errors import CheckpointError
from headport.export.checkpoint import (
    checkpoint_sha256,
    find_checkpoint,
    load_model,
    load_tokenizer,
)
from tests.conftest import llama_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "llama"))


def edit_weights(folder: Path, **changes: Any) -> None:
    """Replace or add tensors; None removes one."""
    tensors = load_file(folder / WEIGHTS) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / WEIGHTS, {"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(find_checkpoint(str(folder)))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_whole_checkpoint_loads(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load_model(find_checkpoint(str(folder)))
    assert not model.training
    torch.testing.assert_close(model.lm_head.weight, load_file(folder / WEIGHTS)["lm_head.weight"])
    assert capfd.readouterr() == ("", "")  # no bars, no warnings of the libraries


@pytest.mark.parametrize(
    ("path", "message"),
    [("missing", "nothing is there"), ("llama/config.json", "another kind of file")],
)
def test_not_a_folder(folder: Path, path: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(str(folder.parent / path))


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)


def test_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert "no weights" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_never_opened(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    assert "pickled" in refusal(folder)


def test_pickled_weights_load_where_they_are_allowed(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert "pass --allow-pickle" in refusal(folder)
    checkpoint = find_checkpoint(str(folder), allow_pickle=True)
    assert checkpoint.format == "pickle"
    model = load_model(checkpoint)
    torch.testing.assert_close(model.lm_head.weight, tensors["lm_head.weight"])


def test_an_allowed_pickle_still_runs_no_code(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return open, (str(folder / "ran"), "w")

    (folder / WEIGHTS).unlink()
    torch.save({"lm_head.weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot load"):
        load_model(find_checkpoint(str(folder), allow_pickle=True))
    assert not (folder / "ran").exists()


def test_a_pickle_under_another_name_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model.pt")
    with pytest.raises(CheckpointError, match="transformers does not look for"):
        find_checkpoint(str(folder), allow_pickle=True)


def test_a_pickled_file_itself_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model.pt")
    with pytest.raises(CheckpointError, match="give the Hugging Face folder"):
        find_checkpoint(str(folder / "model.pt"))


def test_damaged_weights(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    assert "cannot load" in refusal(folder)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (transformers.T5Config(num_layers=1), "t5"),
        (transformers.BartConfig(), "bart"),  # has a causal class, which is another model
        (transformers.ViTConfig(), "vit"),
        (llama_config(architectures=["LlamaForTokenClassification"]), "LlamaForTokenClassif"),
        (llama_config(architectures=["LlamaModel"]), "LlamaModel"),
    ],
    ids=["seq2seq", "seq2seq-decoder", "vision", "value-head", "no-head"],
)
def test_not_a_causal_language_model(folder: Path, config: Any, found: str) -> None:
    architectures = config.architectures
    config.save_pretrained(folder)
    if architectures:  # saving drops them
        edit_config(folder, architectures=architectures)
    message = refusal(folder)
    assert "causal language model" in message
    assert found in message


def test_remote_code_stays_off(folder: Path) -> None:
    trap = folder / "configuration_own.py"
    trap.write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    assert "--trust-remote-code if you trust it" in refusal(folder)
    assert not (folder / "ran").exists()


def test_trusted_code_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", folder / "modules")
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_config(folder, model_type="own", auto_map=auto, architectures=["OwnModel"])
    assert "--trust-remote-code if you trust it" in refusal(folder)
    checkpoint = find_checkpoint(str(folder), trust_remote_code=True)
    assert type(load_model(checkpoint)).__name__ == "OwnModel"


def test_a_head_bias_the_class_lacks_is_an_error(folder: Path) -> None:
    edit_weights(folder, **{"lm_head.bias": torch.ones(257)})
    assert "no place for: lm_head.bias" in refusal(folder)


def test_a_missing_weight_is_an_error(folder: Path) -> None:
    edit_weights(folder, **{"model.norm.weight": None})
    assert "lacks: model.norm.weight" in refusal(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_non_finite_weight_is_an_error(folder: Path, value: float) -> None:
    weight = load_file(folder / WEIGHTS)["lm_head.weight"].clone()
    weight[7, 3] = value
    edit_weights(folder, **{"lm_head.weight": weight})
    assert "NaN or infinity: lm_head.weight" in refusal(folder)


def test_an_inconsistent_config_is_an_error(folder: Path) -> None:
    edit_config(folder, hidden_size=32)
    assert "llama:" in refusal(folder)


def shard(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / INDEX).is_file()


def test_shards_load_and_are_hashed_in_order(folder: Path, tiny_llama: Path) -> None:
    whole = load_model(find_checkpoint(str(tiny_llama)))
    shard(folder)
    checkpoint = find_checkpoint(str(folder))
    assert len(checkpoint.weight_files) > 1
    assert list(checkpoint.weight_files) == sorted(checkpoint.weight_files)
    torch.testing.assert_close(load_model(checkpoint).lm_head.weight, whole.lm_head.weight)
    first = checkpoint_sha256(checkpoint)
    assert first == checkpoint_sha256(find_checkpoint(str(folder)))
    last = checkpoint.weight_files[-1]
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    assert checkpoint_sha256(checkpoint) != first


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    lost = find_checkpoint(str(folder)).weight_files[-1]
    lost.unlink()
    assert lost.name in refusal(folder)


def test_no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="llama: no tokenizer"):
        load_tokenizer(find_checkpoint(str(folder)))


def test_only_the_base_name_is_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_checkpoint(str(folder)).name == "llama"
    monkeypatch.chdir(folder)
    assert find_checkpoint(".").name == "llama"
