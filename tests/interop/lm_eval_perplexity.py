"""Perplexity as lm-evaluation-harness computes it, against headport's.

    python -m tests.interop.lm_eval_perplexity make FOLDER [--model CHECKPOINT --bundle BUNDLE]
    python tests/interop/lm_eval_perplexity.py check FOLDER

`make` runs in headport's environment, `check` in one with lm-eval (0.4.13), torch and transformers;
headport is not imported there. Exit 0 where every document's log-likelihood, the perplexity and the
bits per byte agree to 1e-6.

Both sides start a document with the model's BOS (EOS where it has none) and score every token of
its text once. Windows are the same where a document fits into one or fills all of its windows: in
others, lm-eval gives a last short window the tokens before it as context, which is headport's
`--overlap`, but of another length in every document.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TOLERANCE = 1e-6
TEXT = "The head is the last matrix of a language model, and a proof says how far answers moved. "


def make(folder: Path, model: str | None, bundle: Path | None) -> None:
    """Write texts, records and headport's figures of them."""
    from transformers import AutoTokenizer

    from headport.export.command import Options as ExportOptions
    from headport.export.command import export
    from headport.validate import Options, validate
    from tests.conftest import llama_config, save_model

    folder.mkdir(parents=True, exist_ok=True)
    if model is None or bundle is None:
        model = str(save_model(folder / "checkpoint", llama_config()))
        bundle = export(ExportOptions(model=model, output=folder / "bundle", force=True)).path
    window = 48 if (folder / "checkpoint").exists() else 256
    tokenizer = AutoTokenizer.from_pretrained(model)
    prefix = tokenizer.bos_token or tokenizer.eos_token
    texts = [_of_length(tokenizer, n) for n in (window // 2, window, 3 * window)]
    records = [{"prompt": prefix, "completion": text} for text in texts]
    file = folder / "records.jsonl"
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    options = Options(
        bundle=bundle,
        reference=model,
        text=(file,),
        window=window,
        greedy_tokens=0,
        attribution_tokens=0,
        noise_floor_tokens=0,
    )
    report = validate(options)
    found = {
        "model": model,
        "window": window,
        "texts": texts,
        "perplexity": report.metrics.perplexity_reference.value,
        "bits_per_byte": report.metrics.bits_per_byte_reference.value,
        "nll": [d.nll_reference * d.tokens for d in report.by_document],
        "tokens": [d.tokens for d in report.by_document],
    }
    (folder / "headport.json").write_text(json.dumps(found), encoding="utf-8")


def _of_length(tokenizer: Any, tokens: int) -> str:
    """A text of exactly so many tokens."""
    ids = tokenizer(TEXT * tokens, add_special_tokens=False)["input_ids"]
    for start in range(len(ids) - tokens):
        text: str = tokenizer.decode(ids[start : start + tokens])
        again = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(again) == tokens:
            return text
    raise SystemExit(f"no text of {tokens} tokens was found")


def check(folder: Path) -> int:
    """Compute the same with lm-eval and compare."""
    from importlib.metadata import version

    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wanted = json.loads((folder / "headport.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(wanted["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(wanted["model"])
    lm = HFLM(pretrained=model, tokenizer=tokenizer, max_length=wanted["window"], batch_size=1)
    requests = [
        Instance("loglikelihood_rolling", {}, (text,), index)
        for index, text in enumerate(wanted["texts"])
    ]
    found = [-float(x) for x in lm.loglikelihood_rolling(requests, disable_tqdm=True)]
    tokens, size = sum(wanted["tokens"]), sum(len(t.encode()) for t in wanted["texts"])
    pairs = {
        **{f"document {i}": pair for i, pair in enumerate(zip(wanted["nll"], found, strict=True))},
        "perplexity": (wanted["perplexity"], math.exp(sum(found) / tokens)),
        "bits per byte": (wanted["bits_per_byte"], sum(found) / math.log(2) / size),
    }
    print(f"lm-eval {version('lm_eval')}, {tokens} tokens, windows of {wanted['window']}")
    worst = 0.0
    for name, (ours, theirs) in pairs.items():
        difference = abs(ours / theirs - 1)
        worst = max(worst, difference)
        print(f"{name}: headport {ours:.9g}, lm-eval {theirs:.9g}, {difference:.1e} apart")
    return int(not worst <= TOLERANCE)


def main(arguments: list[str] | None = None) -> int:
    """Make or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("make", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--bundle", type=Path)
    given = parser.parse_args(arguments)
    if given.step == "make":
        make(given.folder, given.model, given.bundle)
        return 0
    return check(given.folder)


if __name__ == "__main__":
    sys.exit(main())
