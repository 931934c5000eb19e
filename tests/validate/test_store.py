"""A stored reference: the same report without torch, in a fraction of the logits' size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headport.errors import OutputError, ParityError, UsageError
from headport.validate import recording
from headport.validate.command import Options, validate, validate_with
from headport.validate.report import Metrics, Report
from headport.validate.store import StoredReference

WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None
from headport.cli import main
code = main(sys.argv[1:])
assert not any(n.split(".")[0] in ("torch", "transformers") for n, m in sys.modules.items() if m)
raise SystemExit(code)
"""


@pytest.fixture(scope="module")
def store(
    tiny_llama: Path, texts: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, recording.Stored]:
    folder = tmp_path_factory.mktemp("store") / "ref"
    options = recording.Options(
        model=str(tiny_llama), text=texts, output=folder, window=40, greedy_tokens=6
    )
    return folder, recording.record(options)


@pytest.fixture(scope="module")
def live(tiny_bundle: Path, tiny_llama: Path, texts: tuple[Path, ...], reference_of: Any) -> Report:
    options = Options(
        bundle=tiny_bundle, reference=str(tiny_llama), text=texts, window=40, greedy_tokens=6
    )
    return validate_with(reference_of(tiny_llama), options)


def test_without_torch_and_checkpoint_the_report_is_the_same(
    store: Any, live: Report, tiny_bundle: Path, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    found = subprocess.run(
        [
            *(sys.executable, "-c", WITHOUT_TORCH, "validate", str(tiny_bundle)),
            *("--reference", str(store[0]), "--greedy-tokens", "6", "--json", str(file), "--quiet"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert report.verdict == live.verdict == "passed"
    assert report.tokens_scored == live.tokens_scored
    assert report.reference == live.reference
    for name in Metrics.__struct_fields__:
        one, other = getattr(report.metrics, name).value, getattr(live.metrics, name).value
        assert one == pytest.approx(other, rel=1e-4, abs=2e-5), name
    assert [p.greedy for p in report.slices] == [p.greedy for p in live.slices]
    assert report.attribution is not None and report.attribution.tokens > 50
    assert report.noise_floor is not None and report.noise_floor.tokens > 50


def test_recomputed_logits_differ_by_rounding_only(store: Any) -> None:
    folder, stored = store
    found = StoredReference(folder)
    assert 0 <= stored.deviation == found.store.deviation < 1e-5
    assert found.store.head.dtype == "fp32"


def test_a_position_takes_hidden_states_not_logits(store: Any) -> None:
    folder, stored = store
    assert (folder / "hidden.bin").stat().st_size == 4 * 64 * stored.tokens
    assert stored.logit_bytes == 4 * 257 * stored.tokens


def test_weights_that_are_bf16_are_stored_so_and_read_back_exactly(tmp_path: Path) -> None:
    from headport.validate.store import HeadForm, StoredHead

    rng = np.random.default_rng(0)
    weight = rng.normal(size=(7, 3)).astype(np.float32)
    weight = (weight.view(np.uint32) & 0xFFFF0000).view(np.float32)
    form = HeadForm(vocab_size=7, hidden_size=3, dtype="bf16", bias=False, scale=1.0, softcap=None)
    from safetensors.numpy import save_file

    save_file({"weight": (weight.view(np.uint32) >> 16).astype(np.uint16)}, tmp_path / "head")
    found = StoredHead.load(tmp_path / "head", form)
    hidden = rng.normal(size=(2, 3)).astype(np.float32)
    np.testing.assert_array_equal(found.logits(hidden), hidden @ weight.T)


def test_scale_bias_and_softcap_are_applied() -> None:
    from headport.validate.store import HeadForm, StoredHead

    form = HeadForm(vocab_size=2, hidden_size=1, dtype="fp32", bias=True, scale=0.5, softcap=3.0)
    head = StoredHead(form, np.array([[2.0], [4.0]], np.float32), np.array([1.0, -1.0], np.float32))
    expected = 3 * np.tanh(0.5 * (np.array([2.0, 4.0]) * 1.5 + [1, -1]) / 3)
    np.testing.assert_allclose(head.logits(np.array([[1.5]], np.float32))[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 17}, "--window: .* was written with 40, 17 given"),
        ({"max_tokens": 9}, "--max-tokens"),
        ({"text": (Path("a.txt"),)}, "brings its own texts"),
        ({"greedy_tokens": 7}, "no greedy runs of 7 tokens are stored"),
        ({"sampler": True}, "pass the checkpoint"),
        ({"bisect": True}, "states between layers are not stored"),
    ],
)
def test_what_the_store_cannot_answer_is_refused(
    options: dict[str, Any], message: str, store: Any, tiny_bundle: Path
) -> None:
    given = {"greedy_tokens": 0, "attribution_tokens": 0} | options
    with pytest.raises(UsageError, match=message):
        validate(Options(bundle=tiny_bundle, reference=str(store[0]), **given))


@pytest.mark.parametrize("name", ["hidden.bin", "head.safetensors"])
def test_a_damaged_store_is_refused(name: str, store: Any, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(store[0], copy)
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(UsageError, match=f"{name}: missing or changed"):
        StoredReference(copy)


def test_a_foreign_record_is_refused(store: Any, tmp_path: Path) -> None:
    (tmp_path / "reference.json").write_text(json.dumps({"schema_version": 9}))
    with pytest.raises(UsageError, match="no stored reference of this release"):
        StoredReference(tmp_path)


def test_a_document_that_is_not_stored_is_refused(store: Any) -> None:
    with pytest.raises(ParityError, match="into other documents"):
        StoredReference(store[0]).encode(["something else"])


def test_a_head_that_does_not_explain_the_logits_is_not_stored(
    tiny_llama: Path, texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        recording.StoredHead, "logits", lambda self, h: h @ self._weight.T * np.float32(1.001)
    )
    options = recording.Options(
        model=str(tiny_llama), text=texts, output=tmp_path / "ref", greedy_tokens=0
    )
    with pytest.raises(ParityError, match="more than rounding explains"):
        recording.record(options)
    assert not (tmp_path / "ref").exists()


def test_an_existing_folder_is_kept(tiny_llama: Path, texts: Any, tmp_path: Path) -> None:
    options = recording.Options(model=str(tiny_llama), text=texts, output=tmp_path)
    with pytest.raises(OutputError, match="exists"):
        recording.record(options)
