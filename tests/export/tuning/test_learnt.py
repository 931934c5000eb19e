"""Learnt tokens against PEFT itself: read, written, proved, validated, refused if none fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from headport import session_runner
from headport.bundle import Bundle
from headport.errors import CheckpointError, ExportError, ParityError, UsageError
from headport.export import command
from headport.export.checkpoint import checkpoint_sha256, find_checkpoint, load_model
from headport.export.command import Options, export
from headport.export.embedded_parity import read_rows
from headport.export.parity import prove, reference_logits
from headport.export.tuning.applied import apply_adapter
from headport.export.tuning.beginnings import begin_with, read_before
from headport.export.tuning.files import read_adapter
from headport.export.tuning.learnt import find_learnt
from headport.learnt_prefix import PREFIX_FILE, LearntPrefix
from headport.runtime import Generator
from headport.validate import recording
from headport.validate.analysis.command import Options as AnalysisOptions
from headport.validate.analysis.command import analyse_with
from headport.validate.command import Options as ValidateOptions
from headport.validate.command import validate_with
from headport.validate.fitness import check_adapter
from headport.validate.local_reference import LocalReference
from headport.validate.price.command import Options as PriceOptions
from headport.validate.price.command import price_with
from headport.validate.reference import Reference
from tests.conftest import save_model
from tests.learnt_adapters import write_learnt

peft = pytest.importorskip("peft", reason="peft is not installed")

IDS = torch.arange(3, 43).reshape(2, 20) * 5 % 257
TASK = {"task_type": "CAUSAL_LM"}
KINDS: dict[str, Callable[[], Any]] = {
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=5, **TASK),
    "projected": lambda: peft.PrefixTuningConfig(
        num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=24, **TASK
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=6, **TASK),
    "mlp": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=20, **TASK),
    "lstm": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=4,
        encoder_hidden_size=20,
        encoder_reparameterization_type="LSTM",
        encoder_num_layers=1,
        **TASK,
    ),
}


def load(checkpoint: Path) -> Any:
    return load_model(find_checkpoint(str(checkpoint)))


def save_learnt(checkpoint: Path, folder: Path, kind: str) -> Path:
    """Let PEFT make learnt tokens that show in the logits, and save them."""
    torch.manual_seed(1)
    tuned = peft.get_peft_model(load(checkpoint), KINDS[kind]())
    with torch.no_grad():
        for parameter in tuned.prompt_encoder.parameters():
            parameter.normal_(0.0, 0.7)
    tuned.eval().save_pretrained(folder)
    return folder


def peft_logits(checkpoint: Path, adapter: Path, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Of the ids alone: where PEFT lets a prompt be read, it answers to that as well."""
    tuned = peft.PeftModel.from_pretrained(load(checkpoint), adapter).eval()
    with torch.no_grad():
        return tuned(input_ids=ids).logits[:, -ids.shape[1] :]


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("learnt")
    return {kind: save_learnt(tiny_llama, folder / kind, kind) for kind in KINDS}


def say(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_caches_and_as_trained_they_answer_like_peft(kind, tiny_llama, adapters):
    expected, model = peft_logits(tiny_llama, adapters[kind]), load(tiny_llama)
    without = say(model)
    limit = 2e-5 * float(expected.abs().max())
    assert (expected - without).abs().max() > 100 * limit  # they show
    learnt = find_learnt(read_adapter(adapters[kind]), model)
    for pairs in zip(learnt.layers, learnt.trained, strict=True):
        assert all(torch.equal(*parts) for parts in zip(*pairs, strict=True))
    begun = apply_adapter(model, adapters[kind])
    with begun.apart():
        assert (expected - say(model)).abs().max() < limit
    assert torch.equal(say(model), without)
    hook = begin_with(model, learnt.layers)
    assert (expected - say(model)).abs().max() < limit
    hook.remove()


def test_embeddings_that_the_model_scales(tiny_gemma2, tmp_path):
    adapter = save_learnt(tiny_gemma2, tmp_path / "prompt", "prompt")
    expected, model = peft_logits(tiny_gemma2, adapter), load(tiny_gemma2)
    begun = apply_adapter(model, adapter)
    with begun.apart():
        assert (expected - say(model)).abs().max() < 2e-5
    begin_with(model, find_learnt(read_adapter(adapter), model).layers)
    assert (expected - say(model)).abs().max() < 2e-5


Tensors = dict[str, np.ndarray]


def _layers_swapped(own: Tensors) -> Tensors:
    other = {"0": "1", "1": "0"}
    return {
        ".".join([a, other[n], kind]): own[f"{a}.{n}.{kind}"] for a, n, kind in map(_parts, own)
    }


def _keys_as_values(own: Tensors) -> Tensors:
    other = {"key": "value", "value": "key"}
    return {f"{a}.{n}.{kind}": own[f"{a}.{n}.{other[kind]}"] for a, n, kind in map(_parts, own)}


def _parts(name: str) -> list[str]:
    return name.split(".")


def _one_key(own: Tensors) -> Tensors:
    name = "past_key_values.1.key"
    return own | {name: own[name] * np.float32(1.02)}


SPOILT: dict[str, Callable[[Tensors], Tensors]] = {
    "layers swapped": _layers_swapped,
    "keys as values": _keys_as_values,
    "one key 2 % longer": _one_key,
}


@pytest.fixture(scope="module")
def windowed(tiny_gemma2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windowed") / "prefix"
    return save_learnt(tiny_gemma2, folder, "prefix")


@pytest.fixture(scope="module")
def found(tiny_gemma2, windowed, tmp_path_factory) -> tuple[Bundle, dict[str, str]]:
    """A bundle whose prefix leaves a window of 8, and what the parity says of spoilt ones."""
    said: dict[str, str] = {}

    def ask(name: str, *arguments: Any) -> None:
        try:
            prove(*arguments)
        except ParityError as error:
            said[name] = str(error)

    def prove_all(preview: Bundle, plan: Any, reference: Any, heads: Any, _: Any) -> Any:
        file = preview.path / PREFIX_FILE
        own = load_file(file)
        for name, spoil in SPOILT.items():
            save_file({k: np.ascontiguousarray(v) for k, v in spoil(own).items()}, file)
            ask(name, preview, plan, reference, heads)
        save_file(own, file)
        with mock.patch.object(session_runner, "read_prefix", lambda _: LearntPrefix(0, {})):
            ask("dropped", preview, plan, reference, heads)
        model = load(tiny_gemma2)
        begin_with(model, find_learnt(read_adapter(windowed), model).layers)
        model.register_forward_pre_hook(_from_position_0, with_kwargs=True)
        ask("positions", preview, plan, reference_logits(model, plan), heads)
        return prove(preview, plan, reference, heads)

    options = Options(
        model=str(tiny_gemma2), output=tmp_path_factory.mktemp("b") / "b", adapter=windowed
    )
    with mock.patch.object(command, "prove", prove_all):
        return export(options), said


def _from_position_0(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"position_ids": torch.arange(kwargs["input_ids"].shape[1])[None]}


def test_the_parity_finds_every_wrong_beginning(found):
    _, said = found
    assert said.keys() == {*SPOILT, "dropped", "positions"}
    assert all("do not answer like the checkpoint" in message for message in said.values())


def test_the_written_files_answer_like_peft(found, tiny_gemma2, windowed):
    bundle, _ = found
    expected = peft_logits(tiny_gemma2, windowed)[0].numpy()
    with Generator(bundle) as generator:
        logits = generator.logits(IDS[0].tolist())
        reply = generator.generate([IDS[0, :4].tolist()], max_new_tokens=10, eos_token_id=[])[0]
    assert np.abs(logits - expected).max() < 2e-4 * np.abs(expected).max()
    # PEFT's own generate loses the prefix with transformers 5.24, its forward does not.
    ids = torch.tensor([[*IDS[0, :4].tolist(), *reply.token_ids]])
    chosen = peft_logits(tiny_gemma2, windowed, ids)[0, 3:-1].argmax(dim=-1)
    assert chosen.tolist() == reply.token_ids
    manifest = bundle.manifest
    stage = manifest.provenance.stages[0]
    facts = stage.report["adapter"]
    assert (facts["type"], facts["tokens"], facts["name"]) == ("PREFIX_TUNING", 5, "prefix")
    assert (manifest.prefix.tokens, manifest.model.max_context) == (5, 59)
    assert 8 in stage.report["attention_windows"]
    assert manifest.provenance.checkpoint == "gemma2 + prefix"
    assert manifest.provenance.sha256 != facts["checkpoint_sha256"]


def test_validation_lets_the_reference_begin_alike(found, tiny_gemma2, windowed, tmp_path):
    bundle, _ = found
    text = tmp_path / "text.txt"
    text.write_text("Weights moved, and a proof says how far.")
    options = ValidateOptions(
        bundle.path,
        str(tiny_gemma2),
        (text,),
        adapter=windowed,
        greedy_tokens=4,
        attribution_tokens=0,
        noise_floor_tokens=0,
        bisect=True,
    )
    reference = LocalReference(Reference(str(tiny_gemma2), f"--adapter={windowed}"))
    assert recording._context(reference.inner) == bundle.manifest.model.max_context
    report = validate_with(reference, options)
    assert report.reference.sha256 == bundle.manifest.provenance.sha256
    assert report.slices[0].metrics.kl_mean.value < 1e-8
    own = checkpoint_sha256(find_checkpoint(str(tiny_gemma2)))
    alone = msgspec.structs.replace(report.reference, checkpoint="gemma2", sha256=own)
    with pytest.raises(UsageError, match=r"with the adapter prefix, the reference gemma2.*do this"):
        check_adapter(bundle, alone, None, "do this")


def test_verbs_whose_reference_takes_no_adapter(found, tmp_path):
    bundle, _ = found
    text = tmp_path / "text.txt"
    text.write_text("a text")
    with pytest.raises(UsageError, match=r"5 learnt tokens .*use `headport validate --adapter`"):
        analyse_with(None, AnalysisOptions(bundle.path, reference=str(tmp_path), text=(text,)))
    with pytest.raises(UsageError, match="price the same cut of the model without its adapter"):
        price_with(
            None, PriceOptions(bundle.path, bundle.path, reference=str(tmp_path), text=(text,))
        )


def test_rows_of_embeddings_go_with_them(tiny_llama, adapters):
    """Read before a prompt of tokens and rows, or in the cache before it: the same."""
    rows, ids = np.full((2, 64), 0.3, np.float32), IDS.clone()
    ids[0, 3], ids[1, 0] = -1, -2
    model = load(tiny_llama)
    with apply_adapter(model, adapters["prompt"]).apart(), read_rows(model, rows):
        trained = say(model, ids)
    begin_with(model, find_learnt(read_adapter(adapters["prompt"]), model).layers)
    with read_rows(model, rows):
        assert (trained - say(model, ids)).abs().max() < 1e-4
    assert (trained - say(model, IDS)).abs().max() > 1e-2


def test_positions_that_are_asked_for_and_states_are_its_own_tokens(tiny_llama, adapters):
    """Of a long row the reference is asked for some positions, of heads for hidden states."""
    model = load(tiny_llama)
    with torch.no_grad(), read_before(model, torch.ones(3, 64)):
        whole = model(input_ids=IDS, output_hidden_states=True)
        some = model(input_ids=IDS, logits_to_keep=torch.tensor([4, 9])).logits
    assert whole.logits.shape[1] == whole.hidden_states[-1].shape[1] == 20
    assert torch.allclose(some, whole.logits[:, [4, 9]], atol=1e-5)


SIZE = (5, 2 * 2 * 2 * 16)  # tokens; layers, key and value, KV heads, size


@pytest.mark.parametrize(
    ("kind", "shape", "config", "error", "message"),
    [
        (
            "PREFIX_TUNING",
            (5, 96),
            {},
            CheckpointError,
            r"needs .* \[5, 128\] in 2 heads, .*\[5, 96",
        ),
        (
            "PREFIX_TUNING",
            SIZE,
            {"num_attention_heads": 4},
            CheckpointError,
            "in 2 heads, .* in 4;",
        ),
        ("PROMPT_TUNING", (4, 32), {}, CheckpointError, r"another model \(base\): .*\[4, 64\]"),
        ("P_TUNING", (4, 64), {"num_virtual_tokens": 3}, CheckpointError, r"needs .*\[3, 64\]"),
        ("P_TUNING", (4, 64), {"num_virtual_tokens": 0}, CheckpointError, "from 1 up, found 0"),
        ("P_TUNING", (4, 64), {"task_type": "SEQ_CLS"}, ExportError, "task_type='SEQ_CLS'"),
        ("P_TUNING", (4, 64), {"modules_to_save": ["x"]}, ExportError, r"modules_to_save=\['x'\]"),
        ("P_TUNING", (4, 64), {"num_transformer_submodules": 2}, ExportError, "submodules=2"),
        ("CPT", (4, 64), {}, ExportError, "CPT; learnt tokens of this kind are not exported"),
    ],
)
def test_what_does_not_fit(kind, shape, config, error, message, tiny_llama, tmp_path):
    adapter = write_learnt(tmp_path / "a", kind, torch.ones(shape), **config)
    with pytest.raises(error, match=message):
        apply_adapter(load(tiny_llama), adapter)


def test_models_that_keep_something_else(tiny_llama, tmp_path):
    from transformers import MambaConfig

    adapter = write_learnt(tmp_path / "a", "PROMPT_TUNING", torch.ones(4, 32))
    config = MambaConfig(vocab_size=99, hidden_size=32, state_size=4, num_hidden_layers=1)
    mamba = save_model(tmp_path / "mamba", config)
    with pytest.raises(ExportError, match="learnt tokens are put before layers that keep keys"):
        apply_adapter(load(mamba), adapter)
    with pytest.raises(ExportError, match=r"prompts of causal language models, .* a token model"):
        apply_adapter(load(tiny_llama), adapter, "token")
    long = write_learnt(tmp_path / "long", "PREFIX_TUNING", torch.ones(64, SIZE[1]))
    with pytest.raises(ExportError, match="64 learnt tokens leave nothing of a context of 64"):
        export(Options(model=str(tiny_llama), output=tmp_path / "b", adapter=long))


def test_one_tensor_and_no_other(tiny_llama, adapters, tmp_path):
    adapter = write_learnt(tmp_path / "a", "PROMPT_TUNING", torch.ones(4, 64))
    file = adapter / "adapter_model.safetensors"
    save_file({"base_model.lm_head.weight": np.ones((2, 2), np.float32)} | load_file(file), file)
    with pytest.raises(ExportError, match=r"besides it were found .*lm_head.weight; train learnt"):
        apply_adapter(load(tiny_llama), adapter)
    save_file({"other": np.ones(2, np.float32)}, file)
    with pytest.raises(CheckpointError, match="one tensor prompt_embeddings was expected, as PEFT"):
        apply_adapter(load(tiny_llama), adapter)
