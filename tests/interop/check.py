"""onnxruntime-genai and Optimum on merged models, against headport's own answers.

    python tests/interop/check.py FOLDER

FOLDER is what `python -m tests.interop.make FOLDER` wrote. Runs in an environment with
onnxruntime-genai and optimum-onnx; headport is not imported. Exit 0 where every greedy token is
equal, 1 where one is not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

PACKAGES = ("onnxruntime", "onnxruntime-genai", "optimum-onnx", "optimum", "transformers", "torch")
ACCURACY = "session.qdq_matmulnbits_accuracy_level"
ROUNDED = 1e-3  # a larger |Δlogit| of the tiny models is rounded activations, not arithmetic

Rows = list[list[int]]


class Genai:
    """onnxruntime-genai, as its own examples drive it."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime_genai as og

        self._og = og
        self._model = og.Model(str(folder))
        self._folder = folder

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return [int(i) for i in self._og.Tokenizer(self._model).encode(text)]

    def generate(self, prompts: Rows, new_tokens: int, pad: int) -> Rows:
        """Greedy tokens behind each prompt; a batch is padded on the right."""
        width = max(map(len, prompts))
        ids = np.array([p + [pad] * (width - len(p)) for p in prompts], np.int32)
        generator = self._open(len(prompts), width + new_tokens)
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
        return [[int(i) for i in generator.get_sequence(r)][width:] for r in range(len(prompts))]

    def generate_in_pieces(self, prompt: list[int], new_tokens: int) -> list[int]:
        """The same with a prompt that is appended in two pieces."""
        generator = self._open(1, len(prompt) + new_tokens)
        half = max(1, len(prompt) // 2)
        for piece in (prompt[:half], prompt[half:]):
            if piece:
                generator.append_tokens(np.array([piece], np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [int(i) for i in generator.get_sequence(0)][len(prompt) :]

    def logits(self, prompt: list[int]) -> np.ndarray:
        """Logits [T, V] of a prompt."""
        generator = self._open(1, len(prompt) + 1)
        generator.append_tokens(np.array([prompt], np.int32))
        return np.array(generator.get_output("logits"))[0]

    def options(self) -> str:
        """What it opens the model with."""
        config = json.loads((self._folder / "genai_config.json").read_text("utf-8"))
        found = config["model"]["decoder"]["session_options"]
        return ", ".join(f"{k}={v}" for k, v in found.items() if k != "log_id")

    def _open(self, rows: int, max_length: int) -> Any:
        params = self._og.GeneratorParams(self._model)
        params.set_search_options(do_sample=False, max_length=max_length, batch_size=rows)
        return self._og.Generator(self._model, params)


class Optimum:
    """Optimum's ORTModelForCausalLM, as its documentation drives it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        from optimum.onnxruntime import ORTModelForCausalLM

        self._model = ORTModelForCausalLM.from_pretrained(str(folder), **settings)
        self._folder = folder

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        from transformers import AutoTokenizer

        return list(AutoTokenizer.from_pretrained(str(self._folder))(text).input_ids)

    def generate(self, prompts: Rows, new_tokens: int, pad: int) -> Rows:
        """Greedy tokens behind each prompt; a batch is padded on the left."""
        import torch

        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        found = self._model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False
        )
        return [row[width:] for row in found.tolist()]

    def logits(self, prompt: list[int]) -> np.ndarray:
        """Logits [T, V] of a prompt."""
        import torch

        ids = torch.tensor([prompt])
        return self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].numpy()

    def options(self) -> str:
        """What it opens the model with."""
        found = self._model.session.get_session_options()
        level = found.graph_optimization_level
        try:
            accuracy = found.get_session_config_entry(ACCURACY)
        except RuntimeError:
            accuracy = "not set"
        return (
            f"graph_optimization_level={level}, intra_op_num_threads={found.intra_op_num_threads}, "
            f"{ACCURACY} {accuracy}, providers {self._model.session.get_providers()}"
        )


RUNTIMES: dict[str, Callable[[Path], Genai | Optimum]] = {"genai": Genai, "optimum": Optimum}


def until_end(ids: list[int], eos: int | list[int] | None) -> list[int]:
    """Ids up to the first end-of-text token, that one included."""
    ends = eos if isinstance(eos, list) else [eos]
    stop = next((n for n, i in enumerate(ids) if i in ends), len(ids))
    return ids[: stop + 1]


def compare(runtime: Genai | Optimum, case: dict[str, Any]) -> tuple[int, int]:
    """(equal, compared) rows of greedy tokens: each prompt alone, and all as one batch."""
    prompts, new, pad, eos = (case[k] for k in ("prompts", "new_tokens", "pad", "eos"))
    alone = [runtime.generate([p], new, pad)[0] for p in prompts]
    ways = [alone, runtime.generate(prompts, new, pad)]
    if isinstance(runtime, Genai):
        ways.append([runtime.generate_in_pieces(p, new) for p in prompts])
    equal = [
        until_end(row, eos) == wanted
        for rows in ways
        for row, wanted in zip(rows, case["ids"], strict=True)
    ]
    return sum(equal), len(equal)


def check(name: str, case: dict[str, Any], folder: Path) -> bool:
    """Run one merged model in every runtime it was merged for, and print what came out."""
    expected = np.load(folder / "merged" / f"{name}.npy")
    right = True
    for key in case["runtimes"]:
        start = time.perf_counter()
        runtime = RUNTIMES[key](folder / "merged" / name)
        equal, compared = compare(runtime, case)
        texts = sum(runtime.encode(text) == ids for text, ids in case["texts"].items())
        error = np.abs(runtime.logits(case["prompts"][0]) - expected).max()
        print(
            f"{name:<34} {key:<8} greedy {equal}/{compared}  texts {texts}/{len(case['texts'])}  "
            f"max |Δlogit| {error:.1e}  {time.perf_counter() - start:.1f} s",
            flush=True,
        )
        right &= equal == compared > 0 and texts == len(case["texts"])
    return right


def show_options(name: str, case: dict[str, Any], folder: Path) -> bool:
    """A layout that ONNX Runtime fuses by default, with and without the bundle's option."""
    import onnxruntime

    merged, prompt = folder / "merged" / name, case["prompts"][0]
    expected = np.load(folder / "merged" / f"{name}.npy")
    config_file = merged / "genai_config.json"
    config = json.loads(config_file.read_text("utf-8"))
    exact = Genai(merged).logits(prompt)
    asked = config["model"]["decoder"]["session_options"].pop(ACCURACY)
    config_file.write_text(json.dumps(config), encoding="utf-8")
    fused = Genai(merged).logits(prompt)
    config["model"]["decoder"]["session_options"][ACCURACY] = asked
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(ACCURACY, asked)
    found = {
        "genai, the merged genai_config.json": exact,
        "genai, the option taken out of it": fused,
        "optimum, as it opens a model": Optimum(merged).logits(prompt),
        "optimum, session_options given": Optimum(merged, session_options=options).logits(prompt),
    }
    errors = {what: float(np.abs(logits - expected).max()) for what, logits in found.items()}
    for what, error in errors.items():
        print(f"{name:<34} {what:<36} max |Δlogit| {error:.1e}", flush=True)
    given, without, default, chosen = errors.values()
    return given < ROUNDED and chosen < ROUNDED and without > ROUNDED and default > ROUNDED


def main() -> int:
    """Check every merged model of a folder."""
    folder = Path(sys.argv[1])
    answers = json.loads((folder / "answers.json").read_text("utf-8"))
    print(", ".join(f"{package} {version(package)}" for package in PACKAGES))
    right, options = {}, {}
    for name, case in answers.items():
        if case["fusible"]:
            right[name] = show_options(name, case, folder)
            continue
        right[name] = check(name, case, folder)
        for key in case["runtimes"]:
            if key not in options:
                options[key] = RUNTIMES[key](folder / "merged" / name).options()
    for key, found in options.items():
        print(f"{key} opens a model with {found}")
    wrong = [name for name, ok in right.items() if not ok]
    print(
        f"{len(right) - len(wrong)} of {len(right)} merged models right", *wrong, sep="\n  wrong: "
    )
    return 0 if right and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
