"""`headport domain`: tokens by name, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.domains import domain_names, read_domain
from headport.errors import BundleError, OutputError, UsageError
from headport.quantize.domain import Options, save_domain
from headport.quantize.prune import Options as PruneOptions
from headport.quantize.prune import prune
from headport.runner import open_runner
from headport.runtime import Generator
from tests.quantize.prune.tokenizers_of import byte_level
from tests.quantize.prune.toys import count_texts, write_bundle


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("toy") / "toy", byte_level())


@pytest.fixture(scope="module")
def counts(source: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return count_texts(tmp_path_factory.mktemp("counts") / "c.parquet", source)


@pytest.fixture(scope="module")
def saved(source: Bundle, counts: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    output = tmp_path_factory.mktemp("saved") / "saved"
    return save_domain(
        Options(bundle=source.path, output=output, name="notes", counts=counts, min_count=2)
    )


def test_a_domain_is_what_pruning_would_keep(source, counts, saved, tmp_path):
    pruned = prune(
        PruneOptions(bundle=source.path, output=tmp_path / "p", counts=counts, min_count=2, least=1)
    )
    assert read_domain(saved, "notes") == tuple(np.load(pruned.path / "vocab_map.npy").tolist())
    assert domain_names(saved) == ("notes",) and domain_names(source) == ()


def test_a_domain_of_a_pruned_bundle_is_within_what_it_kept(source, counts, tmp_path):
    cut = PruneOptions(bundle=source.path, output=tmp_path / "p", counts=counts, min_count=2)
    pruned = prune(msgspec.structs.replace(cut, least=1))
    kept = np.load(pruned.path / "vocab_map.npy").tolist()
    wider = Options(bundle=pruned.path, output=tmp_path / "d", name="all", counts=counts)
    assert read_domain(save_domain(wider), "all") == tuple(kept)


def test_nothing_else_changes(source, saved):
    for name, entry in source.manifest.files.items():
        assert saved.manifest.files[name] == entry
    assert saved.manifest.files.keys() - source.manifest.files.keys() == {"domains/notes.json"}
    assert saved.manifest.provenance.stages[-1].stage == "domain"
    assert saved.manifest.selftest == source.manifest.selftest
    Bundle.open(saved.path)


def test_a_second_domain_joins_the_first_and_stages_carry_them(saved, counts, tmp_path):
    both = save_domain(
        Options(bundle=saved.path, output=tmp_path / "b", name="few", counts=counts, max_size=300)
    )
    assert domain_names(both) == ("few", "notes") and len(read_domain(both, "few")) <= 300
    output = prune(
        PruneOptions(bundle=both.path, output=tmp_path / "o", counts=counts, mode="output", least=1)
    )
    assert read_domain(output, "notes") == read_domain(saved, "notes")
    renumbered = prune(
        PruneOptions(bundle=both.path, output=tmp_path / "n", counts=counts, mode="both", least=1)
    )
    with pytest.raises(BundleError, match="belong to another tokenizer"):
        read_domain(renumbered, "notes")


def test_a_domain_of_the_same_name_is_replaced_only_when_told_to(saved, counts, tmp_path):
    again = Options(bundle=saved.path, output=tmp_path / "b", name="notes", counts=counts)
    with pytest.raises(UsageError, match=r"a domain 'notes' already; choose another .*--force"):
        save_domain(again)
    replaced = save_domain(msgspec.structs.replace(again, force=True))
    assert set(read_domain(replaced, "notes")) > set(read_domain(saved, "notes"))


def test_replies_hold_tokens_of_the_domain_only(saved):
    allowed = read_domain(saved, "notes")
    with Generator(saved) as generator:
        [reply] = generator.generate(
            "a", allowed=allowed, max_new_tokens=8, temperature=1.5, seed=3
        )
    assert set(reply.token_ids) <= set(allowed)
    runner = open_runner(saved)
    states = np.random.default_rng(0).normal(size=(2, 24)).astype(np.float32)
    few = np.array(allowed[:9])
    expected = runner.full_logits(states)[:, few]
    assert np.allclose(runner.rows(states, few), expected, atol=1e-5)


def test_wrong_use_is_refused(source, saved, counts, tmp_path, capsys):
    with pytest.raises(UsageError, match=r"no domain 'law' in it \(domains: notes\)"):
        read_domain(saved, "law")
    usual = {"bundle": source.path, "output": tmp_path / "x", "counts": counts}
    with pytest.raises(UsageError, match=r"letters, digits, \. _ - was expected, '\.\./x' given"):
        save_domain(Options(name="../x", **usual))
    with pytest.raises(UsageError, match="nothing says which tokens to keep"):
        save_domain(Options(name="x", bundle=source.path, output=tmp_path / "x"))
    with pytest.raises(OutputError, match="--force"):
        save_domain(Options(name="x", **(usual | {"output": saved.path})))
    assert main(["domain", str(source.path), "-o", str(tmp_path / "y"), "--name", "n"]) == 2
    argv = ["domain", str(source.path), "-o", str(tmp_path / "y"), "--name", "n"]
    assert main([*argv, "--counts", str(counts)]) == 0
    assert "domain n of" in capsys.readouterr().out


def test_a_damaged_domain_is_named(saved, tmp_path):
    import shutil

    folder = tmp_path / "damaged"
    shutil.copytree(saved.path, folder)
    file = folder / "domains" / "notes.json"
    file.write_text(json.dumps({"token_ids": "all"}))
    with pytest.raises(BundleError, match="not a domain that can be read"):
        read_domain(Bundle(folder, saved.manifest), "notes")
