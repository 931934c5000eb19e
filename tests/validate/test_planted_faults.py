"""Planted faults: each fails the gate that is made for it, and the split names the right part.

Faults of weights and graphs are planted in a copy of a bundle, faults of a runtime in how the
candidate is run, faults of a sampler in the draw. `docs/validate.md` lists the same rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.errors import ParityError
from headport.runtime.sampling.noise import NoiseKey
from headport.runtime.sampling.sampler import choose
from headport.runtime.sampling.settings import Sampling
from headport.validate import sampler_parity as samplers
from headport.validate.attribution import attribute, sampled_jobs
from headport.validate.candidate import Candidate
from headport.validate.comparison import Material, check_ids, compare, jobs_of, prepare
from headport.validate.documents import read_texts
from headport.validate.figures import figures
from headport.validate.gates import DEFAULT_GATES, Judged, evaluate
from headport.validate.sampler_parity import sampler_parity
from headport.validate.wire import SamplingCase
from tests.validate import sabotage

LOGITS, KL, TOP1 = "max_abs_logit_error", "kl_mean", "top1_agreement_tie_adjusted"
ALL = {LOGITS, KL, TOP1}
Change = Callable[[Any], Any]


def weight(fragment: str, change: Change) -> sabotage.Fault:
    """Change the first tensor whose name holds the fragment."""

    def plant(folder: Path) -> None:
        manifest = sabotage.read_manifest(folder)
        tensor = next(t for t in manifest.tensors if fragment in t.name)
        values = np.frombuffer(sabotage.read_bytes(folder, tensor), np.float32)
        changed = change(values.reshape(tensor.shape).copy())
        sabotage.write_bytes(folder, tensor, np.ascontiguousarray(changed, np.float32).tobytes())

    return plant


def exchange(first: str, second: str) -> sabotage.Fault:
    """Two tensors of equal shape change places."""

    def plant(folder: Path) -> None:
        manifest = sabotage.read_manifest(folder)
        one, other = (next(t for t in manifest.tensors if n in t.name) for n in (first, second))
        data = [sabotage.read_bytes(folder, tensor) for tensor in (one, other)]
        sabotage.write_bytes(folder, one, data[1])
        sabotage.write_bytes(folder, other, data[0])

    return plant


def attention(name: str, change: Change) -> sabotage.Fault:
    """Change an attribute of every attention call."""

    def plant(folder: Path) -> None:
        manifest = sabotage.read_manifest(folder)
        file = folder / manifest.graphs["backbone"].file
        model = ir.load(file)
        calls = [
            node for node in model.graph if name in node.attributes and "window" in node.attributes
        ]
        assert calls, "no attention call to change"
        for node in calls:
            found = node.attributes[name]
            value = change(found.value)
            made = ir.AttrInt64 if isinstance(value, int) else ir.AttrFloat32
            node.attributes[name] = made(name, value)
        ir.save(model, file)

    return plant


def _rounded_to_4_bits(w: Any) -> Any:
    step = np.abs(w).max(axis=1, keepdims=True) / 7
    return np.round(w / step) * step


def _with_zero_row(w: Any) -> Any:
    w[0] = 0
    return w


def _half_and_back(w: Any) -> Any:
    """The largest weights overflow in fp16 and are clamped to its largest number."""
    scaled = np.clip(w * 2.0**17, -65504, 65504)
    return scaled / 2.0**17


# what, bundle, fault, gates that must fail, part that must be named
PLANTED = [
    ("bias dropped", "phi", sabotage.drop_bias, ALL, "head"),
    ("scale dropped", "cohere", sabotage.drop_scale, {LOGITS, KL}, "head"),
    ("softcap dropped", "gemma", sabotage.drop_softcap, {LOGITS, KL}, "head"),
    ("two rows swapped", "llama", sabotage.swap_rows, {LOGITS, KL}, "head"),
    ("head data of another bundle", "llama", sabotage.other_head, ALL, "head"),
    ("head 1 % too large", "llama", weight("lm_head", lambda w: w * 1.01), {LOGITS, KL}, "head"),
    (
        "rows moved by one (wrong map)",
        "llama",
        weight("lm_head", lambda w: np.roll(w, 1, 0)),
        ALL,
        "head",
    ),
    ("one row zero", "llama", weight("lm_head", _with_zero_row), {LOGITS, KL}, "head"),
    ("head secretly in 4 bits", "llama", weight("lm_head", _rounded_to_4_bits), ALL, "head"),
    ("fp16 overflow in the head", "llama", weight("lm_head", _half_and_back), {LOGITS, KL}, "head"),
    ("columns of the head reversed", "llama", weight("lm_head", lambda w: w[:, ::-1]), ALL, "head"),
    ("one bit flipped", "llama", sabotage.flip_bit, {LOGITS, KL}, "backbone"),
    (
        "embedding moved by one row",
        "llama",
        weight("embed", lambda w: np.roll(w, 1, 0)),
        ALL,
        "backbone",
    ),
    (
        "embedding 5 % too large",
        "llama",
        weight("embed", lambda w: w * 1.05),
        {LOGITS, KL},
        "backbone",
    ),
    ("layers exchanged", "llama", exchange("0.mlp.up", "1.mlp.up"), ALL, "backbone"),
    ("gate and up exchanged", "llama", exchange("0.mlp.gate", "0.mlp.up"), ALL, "backbone"),
    (
        "key and value exchanged",
        "llama",
        exchange("0.self_attn.k_proj", "0.self_attn.v_proj"),
        ALL,
        "backbone",
    ),
    (
        "output projection lost",
        "llama",
        weight("1.self_attn.o_proj", lambda w: w * 0),
        ALL,
        "backbone",
    ),
    ("attention scale doubled", "llama", attention("scale", lambda v: v * 2), ALL, "backbone"),
    ("window lost", "gemma", attention("window", lambda _: 64), {LOGITS, KL}, "backbone"),
    (
        "attention softcap widened",
        "gemma",
        attention("softcap", lambda v: v * 8),
        {LOGITS, KL},
        "backbone",
    ),
]


def _padded(run: Any) -> Any:
    """Left padding that nothing masks."""

    def hidden_states(windows: Any) -> Any:
        pads = np.zeros(3, np.int64)
        return [states[3:] for states in run([np.append(pads, ids) for ids in windows])]

    return hidden_states


def _stale(run: Any) -> Any:
    """The cache of another prompt was not cleared."""

    def hidden_states(windows: Any) -> Any:
        left = np.array([9, 40, 7, 8, 100])
        return [states[5:] for states in run([np.append(left, ids) for ids in windows])]

    return hidden_states


def _shifted(run: Any) -> Any:
    """Every answer stands one position late: labels and logits are shifted twice."""
    return lambda windows: [np.roll(states, 1, axis=0) for states in run(windows)]


def _chunked(run: Any) -> Any:
    """The second half of a window starts without the first half's cache."""

    def hidden_states(windows: Any) -> Any:
        halves = [(ids[: len(ids) // 2], ids[len(ids) // 2 :]) for ids in windows]
        return [np.concatenate(run(list(pair))) for pair in halves]

    return hidden_states


def _last_only(run: Any) -> Any:
    """One hidden state is handed to every position."""
    return lambda windows: [np.repeat(states[-1:], len(states), 0) for states in run(windows)]


RUNTIME = [
    ("padding on the wrong side", _padded),
    ("stale cache", _stale),
    ("labels shifted", _shifted),
    ("chunks without their past", _chunked),
    ("last position everywhere", _last_only),
]


def _order(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    """top-p before top-k."""
    first = samplers.keep(logits, Sampling(s.temperature, 0, s.top_p, 0.0))
    kept = first[samplers.keep(logits[first], Sampling(s.temperature, s.top_k, 1.0, s.min_p))]
    return choose(logits[kept], ids[kept], Sampling(s.temperature), key)


def _temperature_twice(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(logits, ids, Sampling(s.temperature**2, s.top_k, s.top_p, s.min_p), key)


def _one_more(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(
        logits, ids, Sampling(s.temperature, s.top_k and s.top_k + 1, s.top_p, s.min_p), key
    )


def _seedless(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(logits, ids, s, NoiseKey(0, key.step, key.sample))


def _stepless(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(logits, ids, s, NoiseKey(key.seed, 0, key.sample))


def _shifted_noise(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(logits, ids + 1, s, key) - 1


def _no_filter(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(logits, ids, Sampling(s.temperature), key)


def _no_min_p(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(logits, ids, Sampling(s.temperature, s.top_k, s.top_p), key)


def _last_tie(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    if s.temperature == 0:
        return int(np.flatnonzero(logits == logits.max())[-1])
    return choose(logits, ids, s, key)


# what, faulty draw, parameters by which the report names it
SAMPLERS = [
    ("filters in another order", _order, "top_k 40, top_p"),
    ("temperature applied twice", _temperature_twice, "temperature"),
    ("top-k off by one", _one_more, "top_k 1"),
    ("seed not heeded", _seedless, "temperature"),
    ("step not heeded", _stepless, "temperature"),
    ("noise of the next id", _shifted_noise, "temperature"),
    ("filters not heeded", _no_filter, "top_"),
    ("min-p dropped", _no_min_p, "min_p"),
    ("tie to the highest id", _last_tie, "greedy"),
]


@pytest.fixture(scope="module")
def sources(request: pytest.FixtureRequest) -> Callable[[str], tuple[Path, Path]]:
    names = {
        "llama": ("tiny_llama", "tiny_bundle"),
        "phi": ("tiny_phi", "phi_bundle"),
        "cohere": ("tiny_cohere", "cohere_bundle"),
        "gemma": ("tiny_gemma2", "gemma_bundle"),
    }

    def find(name: str) -> tuple[Path, Path]:
        checkpoint, bundle = (request.getfixturevalue(n) for n in names[name])
        return checkpoint, bundle

    return find


@pytest.fixture(scope="module")
def llama(tiny_bundle: Path) -> Iterator[Candidate]:
    yield Candidate(Bundle.open(tiny_bundle), threads=1)


def materials_of(candidate: Candidate, texts: Any) -> list[Material]:
    return prepare(read_texts(texts), candidate, 80)


def judge(candidate: Candidate, texts: Any, reference: Any) -> tuple[set[str], str]:
    """Gates of the fp32 row that fail, and the part that the split names."""
    materials = materials_of(candidate, texts)
    found = compare(materials, candidate, reference, window=40)
    part = found.sums.part()
    gates = evaluate(DEFAULT_GATES["fp32"], Judged(figures(part), part.tokens), {})
    split = attribute(sampled_jobs(materials, 40, 0, 80), candidate, reference)
    assert split is not None
    return {gate.metric for gate in gates if gate.verdict == "failed"}, split.largest


@pytest.mark.parametrize(
    ("bundle", "fault", "gates", "part"), [r[1:] for r in PLANTED], ids=[r[0] for r in PLANTED]
)
def test_a_fault_of_the_files(
    bundle: str,
    fault: sabotage.Fault,
    gates: set[str],
    part: str,
    sources: Any,
    texts: Any,
    reference_of: Any,
    tmp_path: Path,
) -> None:
    checkpoint, source = sources(bundle)
    copy = tmp_path / "damaged"
    shutil.copytree(source, copy)
    fault(copy)
    candidate = Candidate(Bundle(copy, sabotage.read_manifest(copy)), threads=1)
    failed, named = judge(candidate, texts, reference_of(checkpoint))
    assert failed >= gates
    assert named == part


@pytest.mark.parametrize("fault", [r[1] for r in RUNTIME], ids=[r[0] for r in RUNTIME])
def test_a_fault_of_the_runtime(
    fault: Any,
    llama: Candidate,
    texts: Any,
    reference_of: Any,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llama, "hidden_states", fault(llama.hidden_states))
    failed, named = judge(llama, texts, reference_of(tiny_llama))
    assert failed == ALL and named == "backbone"


@pytest.mark.parametrize("bundle", ["llama", "phi", "cohere", "gemma"])
def test_without_a_fault_everything_passes(
    bundle: str, sources: Any, texts: Any, reference_of: Any
) -> None:
    checkpoint, source = sources(bundle)
    candidate = Candidate(Bundle.open(source), threads=1)
    assert judge(candidate, texts, reference_of(checkpoint))[0] == set()


def parity(candidate: Candidate, texts: Any, reference: Any) -> Any:
    jobs = list(jobs_of(materials_of(candidate, texts), 16))
    return sampler_parity(jobs, reference)


def test_the_sampler_without_a_fault_draws_the_same_tokens(
    llama: Candidate, texts: Any, reference_of: Any, tiny_llama: Path
) -> None:
    found = parity(llama, texts, reference_of(tiny_llama))
    assert found.verdict == "passed"
    assert [case.first_difference for case in found.cases] == [""] * len(samplers.GRID)
    assert found.distribution_p_value > 1e-3


@pytest.mark.parametrize(
    ("faulty", "names"), [r[1:] for r in SAMPLERS], ids=[r[0] for r in SAMPLERS]
)
def test_a_fault_of_the_sampler(
    faulty: Any,
    names: str,
    llama: Candidate,
    texts: Any,
    reference_of: Any,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draw(logits: Any, case: SamplingCase, key: tuple[int, int, int]) -> int:
        ids = np.arange(len(logits), dtype=np.int64)
        sampling = Sampling(case.temperature, case.top_k, case.top_p, case.min_p)
        return int(faulty(logits, ids, sampling, NoiseKey(*key)))

    keep = samplers.RUNTIMES["python"][1]
    monkeypatch.setitem(samplers.RUNTIMES, "python", (draw, keep))
    monkeypatch.setattr(samplers, "_FREE_DRAWS", 200)
    reference = reference_of(tiny_llama)
    if faulty is _last_tie:  # two tokens share the maximum
        reference = _Tied(reference)
    found = parity(llama, texts, reference)
    assert found.verdict == "failed"
    differing = [case.parameters for case in found.cases if case.first_difference]
    assert any(names in parameters for parameters in differing), differing


class _Tied:
    """A reference whose two best logits are equal."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner.inner

    def draw(self, request: Any) -> Any:
        import torch

        from headport.validate.reference_sampler import distribution, draw
        from headport.validate.wire import Drawn

        row = torch.linspace(-3, 3, 257)
        row[[40, 90]] = 4.0
        found = [draw(row, case, request.keys) for case in request.cases]
        tokens, kept = zip(*found, strict=True)
        return Drawn(257, tokens, kept, distribution(row, request.free)), row.numpy()


@pytest.mark.parametrize("what", ["a token is added", "two tokens change places"])
def test_a_fault_of_the_tokenizer_ends_the_run_before_any_logit(
    what: str, texts: Any, tiny_bundle: Path, reference_of: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, copy)
    file = copy / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    if what == "a token is added":  # a BOS that the checkpoint does not add
        piece = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
        }
    else:
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["h"], vocabulary["e"] = vocabulary["e"], vocabulary["h"]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    candidate = Candidate(Bundle(copy, Bundle.open(tiny_bundle).manifest), threads=1)
    with pytest.raises(ParityError, match="tokenizer and the bundle's differ"):
        check_ids(materials_of(candidate, texts), candidate, reference_of(tiny_llama))
