"""Heads beside the LM head: modules to train, files to save them in, their way into a bundle."""

from headport.export.heads.condition import ConditionProjection, save_condition
from headport.export.heads.files import load_head, save_head
from headport.export.heads.modules import MultiTaskHead, TreeSoftmax, ValueHead, VocabularyHead

__all__ = [
    "ConditionProjection",
    "MultiTaskHead",
    "TreeSoftmax",
    "ValueHead",
    "VocabularyHead",
    "load_head",
    "save_condition",
    "save_head",
]
