"""Peak memory of an export whose checkpoint is larger than the limit.

    python -m benchmarks.export_memory [--layers 28] [--json FILE]

Writes a random Llama of 3.0 B parameters (or what `--layers` gives) shard by shard, exports it and
says what it cost: seconds, peak memory of the process tree, bytes read and written. Needs about
three times the checkpoint in disk space (default 25 GB); everything it wrote is deleted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.tree import run_measured
from tests.conftest import llama_config, save_tokenizer

__all__ = ["ExportMemory", "main"]

_LIMIT_BYTES = 1_500_000_000  # above the largest tensor
_SHARD_BYTES = 1 << 30
_NAMES = {
    "self_attn.q_proj": ("H", "H"),
    "self_attn.k_proj": ("KV", "H"),
    "self_attn.v_proj": ("KV", "H"),
    "self_attn.o_proj": ("H", "H"),
    "mlp.gate_proj": ("I", "H"),
    "mlp.up_proj": ("I", "H"),
    "mlp.down_proj": ("H", "I"),
    "input_layernorm": ("H",),
    "post_attention_layernorm": ("H",),
}


@dataclass(frozen=True)
class ExportMemory:
    """What one export cost."""

    parameters: int
    checkpoint_bytes: int
    largest_tensor_bytes: int  # as exported
    seconds: float
    peak_rss_bytes: int  # of the process tree
    limit_bytes: int

    def __bool__(self) -> bool:
        return 0 < self.peak_rss_bytes <= self.limit_bytes


def _config(layers: int) -> Any:
    return llama_config(
        vocab_size=64_000,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=24,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def _tensors(config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    head_size = config.hidden_size // config.num_attention_heads
    sizes = {
        "H": config.hidden_size,
        "I": config.intermediate_size,
        "KV": config.num_key_value_heads * head_size,
    }
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        x = torch.empty(shape, dtype=torch.bfloat16)
        return x.normal_(0.0, 0.6 * shape[-1] ** -0.5, generator=generator)

    yield "model.embed_tokens.weight", random(config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        for name, dims in _NAMES.items():
            shape = [sizes[d] for d in dims]
            value = random(*shape) if len(shape) == 2 else torch.ones(shape, dtype=torch.bfloat16)
            yield f"model.layers.{layer}.{name}.weight", value
    yield "model.norm.weight", torch.ones(config.hidden_size, dtype=torch.bfloat16)


def write_checkpoint(folder: Path, layers: int) -> tuple[int, int, int]:
    """Write a sharded random checkpoint in bfloat16, one shard in memory at a time.

    Returns:
        Parameters, bytes, elements of the largest tensor.
    """
    config = _config(layers)
    shard: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    parameters = largest = written = 0

    def flush() -> None:
        file = f"model-{len(set(names.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        names.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in _tensors(config):
        shard[name] = tensor
        parameters += tensor.numel()
        largest = max(largest, tensor.numel())
        written += tensor.nbytes
        if sum(t.nbytes for t in shard.values()) >= _SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {"total_size": written}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    save_tokenizer(folder)
    return parameters, written, largest


def main(arguments: list[str] | None = None) -> int:
    """Write, export, print; exit 1 above the limit."""
    parser = argparse.ArgumentParser(description="Peak memory of an export.")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    found = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="export-memory-", dir=found.folder))
    try:
        (work / "checkpoint").mkdir()
        parameters, size, largest = write_checkpoint(work / "checkpoint", found.layers)
        measured = run_measured("export", str(work / "checkpoint"), "-o", str(work / "bundle"))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(measured.output)
    if measured.exit_code:
        return measured.exit_code
    result = ExportMemory(
        parameters=parameters,
        checkpoint_bytes=size,
        largest_tensor_bytes=4 * largest,
        seconds=measured.seconds,
        peak_rss_bytes=measured.peak_rss_bytes,
        limit_bytes=_LIMIT_BYTES + 4 * largest,
    )
    print(
        f"{parameters / 1e9:.2f} B parameters, bfloat16 checkpoint {size / 1e9:.1f} GB, "
        f"exported as fp32 in {measured.seconds:.0f} s\n"
        f"peak of the process tree {result.peak_rss_bytes / 1e9:.2f} GB, limit "
        f"{result.limit_bytes / 1e9:.2f} GB (1.5 GB + the largest tensor, "
        f"{result.largest_tensor_bytes / 1e9:.2f} GB): {'within' if result else 'ABOVE'}"
    )
    if found.json:
        found.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    return 0 if result else 1


if __name__ == "__main__":
    sys.exit(main())
