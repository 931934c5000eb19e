"""Tokenizer, configuration and licence travel with the graphs, and name no machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from headport.errors import ParityError
from headport.export.checkpoint import Checkpoint, find_checkpoint, load_model, load_tokenizer
from headport.export.companions import (
    check_tokenizer,
    generation_defaults,
    write_companions,
    write_licence,
)
from tests.export.test_gguf_metadata import FIELDS, write


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "llama"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "output").mkdir()
    return tmp_path / "output"


@pytest.mark.parametrize(
    ("readme", "stated"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\n", "apache-2.0"),
        ('---\nlicense: "mit"  # really\n---\n', "mit"),
        ("# Model\nlicense: apache-2.0\n", None),
        ("---\nlanguage: en\n---\nlicense: mit\n", None),
        (None, None),
    ],
)
def test_licence_of_a_folder(
    folder: Path, output: Path, readme: str | None, stated: str | None
) -> None:
    if readme is not None:
        (folder / "README.md").write_text(readme)
    (folder / "NOTICE.txt").write_text("notice")
    found = write_licence(find_checkpoint(str(folder)), output)
    assert found.id == stated
    assert found.files == ("LICENSE", "NOTICE.txt")
    assert (output / "LICENSE").read_bytes() == (folder / "LICENSE").read_bytes()
    assert ("README" in found.source) == (stated is not None)


def test_no_licence_at_all(folder: Path, output: Path) -> None:
    (folder / "LICENSE").unlink()
    found = write_licence(find_checkpoint(str(folder)), output)
    assert (found.id, found.source, found.files) == (None, "no statement found", ())


def test_licence_of_a_gguf_file_is_its_own_statement(tmp_path: Path, output: Path) -> None:
    (tmp_path / "LICENSE").write_text("of something else in the same folder")
    file = write(tmp_path, FIELDS)
    found = write_licence(Checkpoint(tmp_path, "gguf", (file,)), output)
    assert (found.id, found.files) == ("apache-2.0", ())
    assert list(output.iterdir()) == []


def test_companions_are_those_of_the_checkpoint(folder: Path, output: Path) -> None:
    private = json.loads((folder / "config.json").read_text()) | {"_name_or_path": str(folder)}
    (folder / "config.json").write_text(json.dumps(private))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            json.loads((folder / "tokenizer_config.json").read_text())
            | {"name_or_path": str(folder)}
        )
    )
    checkpoint = find_checkpoint(str(folder))
    tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint)
    write_companions(checkpoint, tokenizer, model, output)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (output / name).read_bytes() == (folder / name).read_bytes()
    assert not any(str(folder) in file.read_text() for file in output.iterdir())
    assert json.loads((output / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert generation_defaults(model) == {"eos_token_id": 0, "pad_token_id": 0}
    assert check_tokenizer(output, tokenizer) == 5


def test_another_tokenizer_is_noticed(folder: Path, output: Path) -> None:
    checkpoint = find_checkpoint(str(folder))
    tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint)
    write_companions(checkpoint, tokenizer, model, output)
    document = json.loads((output / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (output / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ParityError, match=r"tokenizer\.json"):
        check_tokenizer(output, tokenizer)
