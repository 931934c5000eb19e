"""Facts that belong beside every figure: the bundle, the protocol, the machine."""

from __future__ import annotations

import os
import platform

import numpy as np

from headport.bundle import MANIFEST, Bundle, file_entry
from headport.machine import cpu_model, usable_cpus
from headport.manifest import Head
from headport.session import library_version
from headport.validate.candidate import Candidate
from headport.validate.gates import recipe_name
from headport.validate.report import CandidateFacts, MachineFacts

__all__ = ["candidate_facts", "machine_facts"]


def candidate_facts(bundle: Bundle, candidate: Candidate) -> CandidateFacts:
    """The bundle as it ran."""
    import tokenizers

    manifest = bundle.manifest
    return CandidateFacts(
        bundle=bundle.path.resolve().name,
        manifest_sha256=file_entry(bundle.path / MANIFEST).sha256,
        files={name: entry.sha256 for name, entry in manifest.files.items()},
        checkpoint=manifest.provenance.checkpoint,
        checkpoint_sha256=manifest.provenance.sha256,
        stages=tuple(stage.stage for stage in manifest.provenance.stages),
        target=manifest.target,
        dtype=manifest.model.dtype,
        recipe=recipe_name(manifest.model, candidate.head, manifest.backbone_quantization),
        head=_head_text(candidate.head),
        session_options=manifest.session_options,
        provider=candidate.settings.provider,
        threads=candidate.settings.threads,
        versions={
            "onnxruntime": library_version(),
            "tokenizers": str(tokenizers.__version__),
            "numpy": np.__version__,
        },
    )


def _head_text(head: Head) -> str:
    if head.quantization is None:
        return "not quantised"
    block = f" block {head.quantization.block}" if head.quantization.block else ""
    return f"{head.quantization.format}{block}, activations {head.quantization.activations}"


def machine_facts() -> MachineFacts:
    """This machine."""
    return MachineFacts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_model() or platform.processor() or "not known",
        cpus=usable_cpus(),
        memory_bytes=_memory_bytes(),
        python=platform.python_version(),
    )


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system knows these names
        return None
