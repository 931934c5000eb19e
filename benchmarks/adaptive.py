"""What reading tail clusters only when needed saves: the best tokens of an adaptive softmax.

    python -m benchmarks.adaptive [--vocab 50000] [--hidden 512] [--rows 512] [--threads 1]

A head is trained here on tokens drawn from Zipf's law, s = 1.1, and hidden states that say which
token comes, with noise; then it is exported beside the LM head of a random model of that size.
Compared on held-out hidden states, in turns within one run, one row at a time as in decoding and
all rows at once: the best token, and the best 10, read as needed, against all log-probabilities;
beside PyTorch's own `predict` and `log_prob`. The answers are compared in the same run. Encoding
and the backbone are in no time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from headport.bundle import Bundle
from headport.clustered import ClusteredSoftmax, open_clusters
from headport.export.command import Options, export
from headport.export.heads import save_head
from headport.manifest import AdaptiveHead
from headport.runner import open_runner
from headport.session import SessionSettings, library_version
from tests.conftest import llama_config, save_model, save_tokenizer

__all__ = ["main"]

Float32 = npt.NDArray[np.float32]

_EXPONENT, _NOISE, _TOP = 1.1, 0.8, 10
_STEPS, _BATCH = 300, 512
_TURNS = 7


def main() -> int:
    """Train, export, measure, print."""
    parser = argparse.ArgumentParser(prog="benchmarks.adaptive", description=__doc__)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    found = parser.parse_args()
    torch.set_num_threads(found.threads)
    module, states = _trained(found.vocab, found.hidden, found.rows)
    with tempfile.TemporaryDirectory() as folder:
        bundle = _exported(Path(folder), module, found.vocab, found.hidden)
        print(_table(bundle, module, states, found.threads))
    return 0


def _trained(
    vocab: int, hidden: int, rows: int
) -> tuple[torch.nn.AdaptiveLogSoftmaxWithLoss, Float32]:
    """A head of three clusters, and held-out hidden states [rows, H]."""
    torch.manual_seed(0)
    share = 1 / np.arange(1, vocab + 1) ** _EXPONENT
    rng = np.random.default_rng(0)
    meaning = torch.randn(vocab, hidden)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.from_numpy(rng.choice(vocab, count, p=share / share.sum()))
        return meaning[tokens] + _NOISE * torch.randn(count, hidden), tokens

    cutoffs = [vocab // 25, vocab // 5]
    module = torch.nn.AdaptiveLogSoftmaxWithLoss(hidden, vocab, cutoffs, div_value=4.0)
    optimiser = torch.optim.Adam(module.parameters(), lr=2e-3)
    for _ in range(_STEPS):
        loss = module(*draw(_BATCH)).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return module.eval(), draw(rows)[0].numpy()


def _exported(
    folder: Path, module: torch.nn.AdaptiveLogSoftmaxWithLoss, vocab: int, hidden: int
) -> Bundle:
    config = llama_config(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=1, tie_word_embeddings=True
    )
    checkpoint = save_model(folder / "checkpoint", config)
    save_tokenizer(checkpoint)
    save_head(module, folder / "frequent.safetensors")
    head = f"frequent={folder / 'frequent.safetensors'}"
    return export(Options(model=str(checkpoint), output=folder / "bundle", head=(head,)))


def _table(
    bundle: Bundle, module: torch.nn.AdaptiveLogSoftmaxWithLoss, states: Float32, threads: int
) -> str:
    entry = bundle.manifest.task_heads["frequent"]
    assert isinstance(entry, AdaptiveHead)
    runner = open_runner(bundle, SessionSettings(threads=threads))
    softmax = open_clusters(bundle, runner, "frequent", entry)  # type: ignore[arg-type]
    lines = [
        f"adaptive softmax over {softmax.vocab_size} tokens, cut at {entry.cutoffs[:-1]}, "
        f"{len(states)} rows, {threads} threads, ONNX Runtime {library_version()}, torch "
        f"{torch.__version__}",
        _agreement(softmax, module, states),
        "| what | one row at a time, ms | all rows, ms per row | clusters read per row |",
        "|---|---|---|---|",
    ]
    ways: dict[str, Callable[[Float32], object]] = {
        "all log-probabilities, then the best": lambda h: softmax.log_probs(h).argmax(axis=1),
        "best token, read as needed": softmax.predict,
        f"best {_TOP}, read as needed": lambda h: softmax.top(h, _TOP),
        "PyTorch log_prob, then the best": lambda h: _torch(module, h).argmax(dim=1),
        "PyTorch predict": lambda h: _predict(module, h),
    }
    single = _measure(ways, [states[n : n + 1] for n in range(0, len(states), 4)])
    together = _measure(ways, [states])
    for name, way in ways.items():
        read = "" if name.startswith("PyTorch") else f"{_reads(softmax, way, states):.2f}"
        one, many = 1e3 * single[name], 1e3 * together[name] / len(states)
        lines.append(f"| {name} | {one:.3f} | {many:.4f} | {read} |")
    return "\n".join(lines)


def _agreement(
    softmax: ClusteredSoftmax, module: torch.nn.AdaptiveLogSoftmaxWithLoss, states: Float32
) -> str:
    whole = softmax.log_probs(states)
    error = np.abs(whole - _torch(module, states).numpy()).max()
    best = softmax.predict(states)
    assert (best == whole.argmax(axis=1)).all(), "reading as needed changes no answer"
    same = (best == _predict(module, states).numpy()).mean()
    sums = np.abs(np.exp(whole).sum(axis=1) - 1).max()
    return (
        f"against PyTorch: max |Δ log p| {error:.1e}, same best token {same:.1%}, probabilities "
        f"sum to 1 ± {sums:.0e}"
    )


@torch.no_grad()
def _torch(module: torch.nn.AdaptiveLogSoftmaxWithLoss, states: Float32) -> torch.Tensor:
    return module.log_prob(torch.from_numpy(states))


@torch.no_grad()
def _predict(module: torch.nn.AdaptiveLogSoftmaxWithLoss, states: Float32) -> torch.Tensor:
    return module.predict(torch.from_numpy(states))


def _measure(
    ways: dict[str, Callable[[Float32], object]], parts: list[Float32]
) -> dict[str, float]:
    """Median seconds per part, the ways taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(_TURNS + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            for part in parts:
                way(part)
            if turn:  # the first one opens sessions
                times[name].append((time.perf_counter() - start) / len(parts))
    return {name: float(np.median(found)) for name, found in times.items()}


def _reads(softmax: ClusteredSoftmax, way: Callable[[Float32], object], states: Float32) -> float:
    softmax.reads.clear()
    way(states)
    return sum(softmax.reads.values()) / len(states)


if __name__ == "__main__":
    raise SystemExit(main())
