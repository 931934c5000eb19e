"""The execution providers a session can run on, one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headport.errors import UsageError

__all__ = [
    "AUTO",
    "FALLBACK_HELP",
    "PROVIDERS",
    "PROVIDER_HELP",
    "Provider",
    "ProviderChoice",
    "find_provider",
    "provider_of_target",
]

AUTO = "auto"  # the provider that the bundle's target was lowered for

# As options of every verb that runs a bundle.
ProviderChoice = Literal["auto", "cpu", "cuda"]
PROVIDER_HELP = "where it runs; auto is what the bundle was lowered for"
FALLBACK_HELP = "let the CPU run what the provider lacks, or all if it is not here; else an error"


@dataclass(frozen=True)
class Provider:
    """One execution provider."""

    key: str  # as users name it
    name: str  # as ONNX Runtime names it
    device: str  # where its buffers lie, as ONNX Runtime names it
    options: Mapping[str, str] = field(default_factory=dict)  # of the provider, all explicit
    library: str | None = None  # file in onnxruntime/capi that must load
    optional: tuple[str, ...] = ()  # libraries that it looks for while it runs


PROVIDERS = {
    provider.key: provider
    for provider in (
        Provider("cpu", "CPUExecutionProvider", "cpu"),
        Provider(
            "cuda",
            "CUDAExecutionProvider",
            "cuda",
            # TF32 keeps ten bits of a factor, and is on by default.
            options={"device_id": "0", "use_tf32": "0"},
            library="libonnxruntime_providers_cuda.so",
            optional=("libcudnn.so.9", "libcufft.so.12", "libnvrtc.so.13"),
        ),
    )
}

_OF_TARGETS = {"ort-cuda": "cuda"}  # all others: cpu


def find_provider(name: str) -> Provider:
    """A provider by its key or by ONNX Runtime's name.

    Raises:
        UsageError: If there is none of that name.
    """
    for provider in PROVIDERS.values():
        if name in (provider.key, provider.name):
            return provider
    raise UsageError(f"provider {name!r}: use one of {', '.join(PROVIDERS)}")


def provider_of_target(target: str) -> Provider:
    """The provider that bundles of a target are made for."""
    return PROVIDERS[_OF_TARGETS.get(target, "cpu")]
