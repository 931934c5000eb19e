"""`headport quantize --backbone` from options to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle, file_entry
from headport.cli import main
from headport.errors import OutputError, QuantizeError, UsageError
from headport.ledger import find_tensor, read_tensor
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.manifest import encode_manifest
from headport.quantize import Options, quantize
from headport.quantize.blocks import BLOCKS
from headport.recipe import read_recipe
from headport.runner import open_runner
from headport.selftest import run_selftest
from tests.quantize import mlp_bundles as mlp

IDS = np.array([[3, 0, 30, 7, 7], [1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return mlp.mlp_bundle(tmp_path_factory.mktemp("mlp") / "b")


def _options(bundle: Bundle, output: Path, **changes: Any) -> Options:
    return Options(bundle=bundle.path, output=output, **changes)


def hidden_states(bundle: Bundle) -> np.ndarray:
    runner = open_runner(bundle, heads=())
    return runner.forward(runner.new_cache(2, 5), IDS, np.array([5, 5]))


def restored(bundle: Bundle, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights that a quantised bundle's tensors stand for, all others as they were."""
    record = bundle.manifest.backbone_quantization
    assert record is not None
    changed = dict(found)
    for name, how in (record.matrices | record.embedding).items():
        stored = read_tensor(
            bundle, find_tensor(bundle.manifest, "backbone", f"{name}.{how.format}")
        ).astype(np.float64)
        if how.block is not None:
            scale = find_tensor(bundle.manifest, "backbone", f"{name}.scale")
            step = np.repeat(read_tensor(bundle, scale), how.block, axis=1)
            stored *= step[:, : stored.shape[1]]
        changed[name] = stored
    return changed


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        *(({"backbone": "int8", "backbone_block": b}, 1e-4, 0.02) for b in BLOCKS),
        ({"backbone": "int4", "backbone_block": 16}, 1e-2, 0.3),
        ({"backbone": "int4", "backbone_block": 256}, 1e-2, 0.3),
        ({"backbone": "fp16"}, 1e-6, 1e-3),
        ({"embedding": "int8", "embedding_block": 16}, 1e-4, 0.02),
        ({"embedding": "fp16"}, 1e-6, 1e-3),
        ({"backbone": "int8", "embedding": "int8", "override": ("*.up=int4:16",)}, 1e-3, 0.3),
    ],
    ids=str,
)
def test_hidden_states_are_those_of_the_restored_weights(
    source: Bundle, tmp_path: Path, changes: dict[str, Any], least: float, most: float
) -> None:
    bundle = quantize(_options(source, tmp_path / "o", **changes))
    found = hidden_states(bundle)
    expected = mlp.forward(restored(bundle, mlp.weights()), IDS)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()
    exact = mlp.forward(mlp.weights(), IDS)
    change = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert least < change < most
    assert run_selftest(bundle)


def test_record_and_report(source: Bundle, tmp_path: Path) -> None:
    bundle = quantize(
        _options(source, tmp_path / "o", backbone="int8", override=(f"{mlp.UP}=none",))
    )
    record = bundle.manifest.backbone_quantization
    assert record is not None and set(record.matrices) == {mlp.DOWN, mlp.MIX, mlp.GATE}
    report = bundle.manifest.provenance.stages[-1].report
    assert report["formats"] == {"int8 block 64": 3}
    assert report["left"] == {
        mlp.UP: "not asked for",
        mlp.STACK: "read by MatMul",
        mlp.EMBED: "looked up by token id",
    }
    assert report["check"]["products"] == 4, "one matrix is multiplied with twice"
    assert 0 < report["row_error_max"] < 0.01 and report["rows_lost"] == 0
    names = {t.name for t in bundle.manifest.tensors}
    assert {f"{mlp.MIX}.int8", f"{mlp.MIX}.scale", f"{mlp.UP}.transposed"} <= names
    assert mlp.MIX not in names
    sizes = (mlp.H * (mlp.F + 4) for _ in range(1)), (2 * mlp.H * (mlp.H + 4) for _ in range(1))
    assert report["weight_bytes_after"] == sum(sum(s) for s in sizes)


def test_zero_tiny_and_outlier_rows(tmp_path: Path) -> None:
    found = mlp.weights()
    found[mlp.UP][5], found[mlp.UP][6] = 0, found[mlp.UP][6] * 300
    found[mlp.DOWN][3] *= np.float32(1e-6)
    found[mlp.DOWN][4] *= np.float32(1e-38)
    found[mlp.MIX][:, 9] *= 100
    bundle = quantize(
        _options(mlp.mlp_bundle(tmp_path / "b", found), tmp_path / "o", backbone="int8")
    )
    made = restored(bundle, found)
    assert (made[mlp.UP][5] == 0).all()
    for name, row in ((mlp.UP, 6), (mlp.DOWN, 3), (mlp.DOWN, 4)):
        exact = found[name][row].astype(np.float64)
        assert np.linalg.norm(made[name][row] - exact) < 0.02 * np.linalg.norm(exact)


def test_head_and_backbone_in_one_call(source: Bundle, tmp_path: Path) -> None:
    both = quantize(_options(source, tmp_path / "o", backbone="int8", head="int8"))
    assert [s.stage for s in both.manifest.provenance.stages] == ["quantize", "quantize"]
    first = quantize(_options(source, tmp_path / "a", backbone="int8"))
    second = quantize(_options(first, tmp_path / "c", head="int8"))
    third = quantize(_options(source, tmp_path / "d", head="int8"))
    fourth = quantize(_options(third, tmp_path / "e", backbone="int8"))
    for other in (second, fourth):
        assert {t.sha256 for t in both.manifest.tensors} == {
            t.sha256 for t in other.manifest.tensors
        }
        assert both.manifest.heads == other.manifest.heads
    assert {p.name for p in tmp_path.iterdir()} == {"o", "a", "c", "d", "e"}


def test_a_tied_weight_is_stored_once_if_both_ends_are_int8_alike(tmp_path: Path) -> None:
    tied = mlp.mlp_bundle(tmp_path / "b", tied=True)
    bundle = quantize(_options(tied, tmp_path / "o", embedding="int8", head="int8", block=32))
    head = bundle.manifest.heads["lm"]
    assert head.tied
    stored = [t for t in bundle.manifest.tensors if t.shape == (mlp.V, mlp.H)]
    assert len(stored) == 1 and stored[0].dtype == "int8" and len(stored[0].consumers) == 2
    assert run_selftest(bundle)
    later = quantize(_options(tied, tmp_path / "h", head="int8", block=32))
    later = quantize(_options(later, tmp_path / "i", embedding="int8", embedding_block=32))
    assert later.manifest.heads == bundle.manifest.heads
    other = quantize(
        _options(tied, tmp_path / "p", embedding="int8", embedding_block=16, head="int8", block=32)
    )
    assert not other.manifest.heads["lm"].tied
    assert len([t for t in other.manifest.tensors if t.shape == (mlp.V, mlp.H)]) == 2
    alone = quantize(_options(tied, tmp_path / "q", embedding="int8"))
    assert (alone.manifest.heads["lm"].weight, alone.manifest.heads["lm"].tied) == ("w", False)
    untied = quantize(
        _options(mlp.mlp_bundle(tmp_path / "u"), tmp_path / "r", embedding="int8", head="int8")
    )
    assert not untied.manifest.heads["lm"].tied


def test_a_certified_head_keeps_its_original_weight(tmp_path: Path) -> None:
    tied = mlp.mlp_bundle(tmp_path / "b", tied=True)
    certified = quantize(_options(tied, tmp_path / "c", head="int8", certify=True))
    bundle = quantize(_options(certified, tmp_path / "o", backbone="int8", embedding="int8"))
    before, after = (b.manifest.heads["lm"].candidates for b in (certified, bundle))
    assert before is not None and after is not None
    assert (before.original, before.original_tied) == (mlp.EMBED, True)
    assert not after.original_tied and after.original != mlp.EMBED
    assert bundle.manifest.heads["lm"].tied, "rounded alike, with the same block"
    assert run_selftest(bundle)
    lowered = lower(LowerOptions(bundle=bundle.path, output=tmp_path / "l", target="ort-cpu"))
    assert not lowered.manifest.heads["lm"].tied and run_selftest(lowered)


def test_refusals_write_nothing(source: Bundle, tmp_path: Path) -> None:
    done = quantize(_options(source, tmp_path / "done", backbone="int8"))
    out = tmp_path / "out"
    for options, error, text in (
        (_options(done, out, backbone="int4"), QuantizeError, "backbone is quantised already"),
        (_options(source, out), UsageError, "nothing to quantise"),
        (_options(source, out, override=("*.q=int8",)), QuantizeError, "no matrix .* fits"),
        (_options(source, out, override=("stack=int8",)), QuantizeError, "no product reads it"),
        (_options(source, out, backbone="int8", block=32), UsageError, "without --head"),
        (_options(source, done.path, backbone="int8"), OutputError, "exists"),
        (_options(source, done.path, backbone="int8", head="int8"), OutputError, "exists"),
    ):
        with pytest.raises(error, match=text):
            quantize(options)
    assert {p.name for p in tmp_path.iterdir()} == {"done"}


def _poisoned(folder: Path, name: str, value: float) -> Bundle:
    bundle = mlp.mlp_bundle(folder)
    tensor = find_tensor(bundle.manifest, "backbone", name)
    with (bundle.path / tensor.file).open("r+b") as stream:
        stream.seek(tensor.offset + 4 * (tensor.shape[1] * 2 + 11))  # row 2, column 11
        stream.write(np.float32(value).tobytes())
    files = {n: file_entry(bundle.path / n) for n in bundle.manifest.files}
    changed = msgspec.structs.replace(bundle.manifest, files=files)
    (bundle.path / "manifest.json").write_bytes(encode_manifest(changed))
    return Bundle.open(bundle.path)


def test_what_cannot_be_stored_is_refused_by_output(tmp_path: Path) -> None:
    turned = _poisoned(tmp_path / "a", f"{mlp.UP}.transposed", np.nan)
    with pytest.raises(QuantizeError, match=r"up.weight holds NaN or infinity in .* output 11;"):
        quantize(_options(turned, tmp_path / "o", backbone="int8"))
    straight = _poisoned(tmp_path / "b", mlp.GATE, np.inf)
    with pytest.raises(QuantizeError, match=r"gate.weight holds NaN or infinity in .* output 2;"):
        quantize(_options(straight, tmp_path / "o", backbone="int4"))
    wide = _poisoned(tmp_path / "c", mlp.GATE, 1e5)
    with pytest.raises(QuantizeError, match=r"float16 cannot hold .* output 2; use int8"):
        quantize(_options(wide, tmp_path / "o", backbone="fp16"))
    assert not (tmp_path / "o").exists()


def test_half_precision_backbone(tmp_path: Path) -> None:
    from tests.toy_bundles import write_toy

    found = {name: w.astype(np.float16) for name, w in mlp.weights().items()}
    head = np.ones((mlp.V, mlp.H), np.float16)
    half = write_toy(tmp_path / "b", head, backbone=mlp.backbone(found, "float16"), max_context=16)
    bundle = quantize(_options(half, tmp_path / "o", backbone="int8", embedding="int8"))
    scale = find_tensor(bundle.manifest, "backbone", f"{mlp.UP}.scale")
    assert scale.dtype == "float", "float16 scales would underflow"
    expected = mlp.forward(restored(bundle, found), IDS)
    assert np.abs(hidden_states(bundle) - expected).max() < 5e-3 * np.abs(expected).max()
    with pytest.raises(QuantizeError, match="stored as float16 already"):
        quantize(_options(half, tmp_path / "p", backbone="fp16"))


def test_command_line(source: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantize", str(source.path), "-o", str(tmp_path / "o")]
    both = [*arguments, "--backbone", "int8", "--head", "int8", "--override", "*.up=none"]
    assert main(both) == 0
    text = capsys.readouterr().out
    assert "3 × int8 block 64; 3 left" in text and "head stored as int8" in text
    assert main(["inspect", str(tmp_path / "o")]) == 0
    assert "3 × int8 block 64 matrices, activations rounded once" in capsys.readouterr().out
    assert main([*arguments, "--force"]) == 2
    assert "nothing to quantise" in capsys.readouterr().err
    assert main([*arguments, "--force", "--backbone", "int8", "--override", "x=int8"]) == 2
    assert "no matrix of the backbone fits 'x'" in capsys.readouterr().err


def test_recipes_are_refused_before_the_first_stage(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"

    def read(section: str) -> dict[str, Any]:
        file.write_text(f"[quantize]\n{section}\n")
        return read_recipe(file).sections["quantize"]

    assert read('backbone = "int8"\noverride = ["*.up=none"]\nhead = "int8"')["override"]
    for section, text in (
        ("", "nothing to quantise"),
        ('backbone = "int8"\nblock = 64', "no meaning without --head"),
        ('override = ["*.up=int3"]', "'int3' is not one of"),
        ('backbone = "int8"\nbackbone_block = 48', "backbone_block"),
        ('head = "fp16"\ncertify = true', "--certify"),
    ):
        with pytest.raises(UsageError, match=text):
            read(section)
