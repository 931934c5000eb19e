"""A language model of one's own, exported without transformers knowing it.

    python -m examples.own_model FOLDER
    headport export examples.own_model:load -o bundle

The first line writes the weights and a tokenizer to FOLDER (here random and tiny; yours are
trained), the second reads them from the folder that OWN_MODEL names, `own-model` by default.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from headport.export import Context, OwnModel, attend

__all__ = ["OwnLM", "load"]

_CONTEXT, _LAYERS, _HEADS, _SIZE = 64, 2, 4, 48
_WINDOW = 16  # of the second layer


class _Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm, self.norm2 = nn.LayerNorm(_SIZE), nn.LayerNorm(_SIZE)
        self.qkv, self.out = nn.Linear(_SIZE, 3 * _SIZE), nn.Linear(_SIZE, _SIZE)
        self.up, self.down = nn.Linear(_SIZE, 4 * _SIZE), nn.Linear(4 * _SIZE, _SIZE)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        batch, tokens, _ = x.shape
        heads = self.qkv(self.norm(x)).reshape(batch, tokens, 3, _HEADS, -1).transpose(1, 3)
        query, key, value = heads.unbind(2)  # each [batch, heads, tokens, size]
        window = _WINDOW if self.index == 1 else 0
        y = attend(query, key, value, context, self.index, window=window)
        x = x + self.out(y.reshape(batch, tokens, _SIZE))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class OwnLM(nn.Module):
    """Learned positions, two attention layers, a head of its own with a bias."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, _SIZE)
        self.positions = nn.Embedding(_CONTEXT, _SIZE)
        self.layers = nn.ModuleList(_Layer(index) for index in range(_LAYERS))
        self.norm = nn.LayerNorm(_SIZE)
        self.head = nn.Linear(_SIZE, vocab_size)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, context: Context
    ) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x, context)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def load() -> OwnModel:
    """What `headport export examples.own_model:load` calls."""
    folder = Path(os.environ.get("OWN_MODEL", "own-model"))
    vocab_size = int((folder / "vocab_size").read_text())
    module = OwnLM(vocab_size)
    load_model(module, folder / "weights.safetensors")
    return OwnModel(
        module=module,
        head=module.head,
        embedding=module.tokens,
        layers=_LAYERS,
        max_context=_CONTEXT,
        tokenizer=folder,
        windows=(_WINDOW,),
        generation={"eos_token_id": 0},
    )


def main(arguments: list[str]) -> int:
    """Write random weights and a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    module = OwnLM(len(alphabet))
    save_model(module, folder / "weights.safetensors")
    (folder / "vocab_size").write_text(str(len(alphabet)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
