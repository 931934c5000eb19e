"""What `adapter_config.json` says of a LoRA adapter; what is not understood is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headport.errors import CheckpointError, ExportError
from headport.export.tuning.files import AdapterFiles

__all__ = ["LoraConfig", "lora_config"]

# Fields that say how it was trained or by whom, or that the tensors themselves decide. The layer's
# own class decides `fan_in_fan_out`, as in PEFT, which corrects a field that contradicts it.
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core"),
    *("modules_to_save", "peft_type", "peft_version", "qalora_group_size", "revision"),
    *("runtime_config", "target_modules", "task_type"),
}
_READ = {
    *("alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "r", "rank_pattern"),
    "use_rslora",
}
# Ways to begin training that leave the model's own weights as they were.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
# Put something before the prompt instead of changing weights, so nothing can be merged; those that
# are exported do not come here.
_PROMPTS = ("MULTITASK_PROMPT_TUNING", "CPT", "CARTRIDGE", "ADAPTION_PROMPT")
_MERGE_FIRST = "merge it with PEFT's merge_and_unload, save the model and export that"


@dataclass(frozen=True)
class LoraConfig:
    """Ranks and scales by module; fields as PEFT's `LoraConfig`."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]

    def rank(self, module: str) -> int:
        """Columns of B and rows of A."""
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scaling(self, module: str) -> float:
        """Factor of B A: alpha / r, or alpha / √r where ranks are to be stable.

        Source: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732.
        """
        rank, alpha = self.rank(module), _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return float(alpha / (math.sqrt(rank) if self.use_rslora else rank))


def _by_pattern(patterns: dict[str, Any], module: str, otherwise: Any) -> Any:
    # The first pattern that matches the end of a module's name, as PEFT reads them.
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return otherwise


def lora_config(files: AdapterFiles) -> LoraConfig:
    """Read and check the configuration.

    Raises:
        CheckpointError: If a field has a value it cannot have.
        ExportError: If the adapter is of another kind, or uses what is not understood here.
    """
    config = files.config
    if (kind := config.get("peft_type")) != "LORA":
        remedy = "learnt tokens of this kind are not exported" if kind in _PROMPTS else _MERGE_FIRST
        raise ExportError(
            f"{files.name}: a LoRA adapter was expected, this one is {kind}; {remedy}"
        )
    if unknown := sorted(_in_effect(config)):
        raise ExportError(
            f"{files.name}: its adapter_config.json asks for what is not done here: "
            f"{', '.join(unknown)}; {_MERGE_FIRST}"
        )
    patterns = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    _check_patterns(files, patterns)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (_all_of(int, [rank, *patterns[0].values()]) and _all_of(float, [alpha])):
        raise CheckpointError(
            f"{files.name}: r and lora_alpha must be numbers above 0, found {rank!r} and {alpha!r}"
        )
    if not _all_of(float, patterns[1].values()):
        raise CheckpointError(f"{files.name}: alpha_pattern must hold numbers, and above 0")
    assert isinstance(rank, int) and isinstance(alpha, int | float)
    return LoraConfig(rank, alpha, bool(config.get("use_rslora")), *patterns)


def _check_patterns(files: AdapterFiles, patterns: Iterable[Any]) -> None:
    texts: list[str] = []
    for each in patterns:
        if not isinstance(each, dict):
            raise CheckpointError(
                f"{files.name}: rank_pattern and alpha_pattern must be objects, found {each!r}"
            )
        texts += each
    targets = files.config.get("target_modules")
    for text in [*texts, *([targets] if isinstance(targets, str) else [])]:
        try:
            re.compile(text)
        except re.error as error:
            raise CheckpointError(
                f"{files.name}: {text!r} is no regular expression ({error})"
            ) from error


def _in_effect(config: dict[str, Any]) -> Iterable[str]:
    for name, value in config.items():
        if name not in _WITHOUT_EFFECT | _READ and value:
            yield f"{name}={value!r}"
    if config.get("bias", "none") != "none":
        yield f"bias={config['bias']!r}"
    if config.get("init_lora_weights", True) not in _PLAIN_BEGINNINGS:
        yield f"init_lora_weights={config['init_lora_weights']!r}"


def _all_of(kind: type[int] | type[float], values: Iterable[Any]) -> bool:
    kinds = (int,) if kind is int else (int, float)
    return all(isinstance(v, kinds) and not isinstance(v, bool) and v > 0 for v in values)
