"""What `adapter_config.json` says of learnt tokens; what is not understood is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

from headport.errors import CheckpointError, ExportError
from headport.export.tuning.files import AdapterFiles

__all__ = ["LEARNT", "PREFIX", "read_learnt_config"]

PREFIX = "PREFIX_TUNING"  # keys and values; the others are embeddings
LEARNT = (PREFIX, "PROMPT_TUNING", "P_TUNING")  # as PEFT names them
# Fields that say how it was trained or by whom. PEFT saves what an encoder or a projection makes of
# its own weights, so neither has any effect on what was saved.
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "encoder_dropout", "encoder_hidden_size"),
    *("encoder_num_layers", "encoder_reparameterization_type", "inference_mode", "init_weights"),
    *("peft_type", "peft_version", "prefix_projection", "prompt_tuning_init"),
    *("prompt_tuning_init_text", "revision", "runtime_config", "tokenizer_kwargs"),
    "tokenizer_name_or_path",
}
_READ = {
    *("num_attention_heads", "num_layers", "num_transformer_submodules", "num_virtual_tokens"),
    *("task_type", "token_dim"),
}


def read_learnt_config(files: AdapterFiles) -> int:
    """Check the configuration of an adapter whose kind is one of `LEARNT`.

    Returns:
        P, its tokens.

    Raises:
        CheckpointError: If it names no number of tokens.
        ExportError: If it asks for what is not understood here, or is for another task.
    """
    if unknown := sorted(_in_effect(files)):
        raise ExportError(
            f"{files.name}: its adapter_config.json asks for what is not done here: "
            f"{', '.join(unknown)}; learnt tokens of a causal language model, and nothing else "
            "trained, were expected"
        )
    tokens = files.config.get("num_virtual_tokens")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise CheckpointError(
            f"{files.name}: num_virtual_tokens must be a number from 1 up, found {tokens!r}"
        )
    return tokens


def _in_effect(files: AdapterFiles) -> Iterator[str]:
    config = files.config
    for name, value in config.items():
        if name not in _WITHOUT_EFFECT | _READ and value:
            yield f"{name}={value!r}"
    if config.get("num_transformer_submodules") not in (None, 1):
        yield f"num_transformer_submodules={config['num_transformer_submodules']!r}"
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        yield f"task_type={config['task_type']!r}"
