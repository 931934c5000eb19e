"""Providers by key or by name, and which one a target is for."""

from __future__ import annotations

import pytest

from headport.errors import UsageError
from headport.providers import PROVIDERS, find_provider, provider_of_target
from headport.session import SessionSettings


def test_found_by_key_and_by_name() -> None:
    for key, provider in PROVIDERS.items():
        assert find_provider(key) is find_provider(provider.name) is provider
    with pytest.raises(UsageError, match="'tpu': use one of cpu, cuda"):
        find_provider("tpu")


def test_auto_is_what_the_target_is_for() -> None:
    for target, name in (
        ("portable", "CPUExecutionProvider"),
        ("ort-cpu", "CPUExecutionProvider"),
        ("ort-cuda", "CUDAExecutionProvider"),
    ):
        assert SessionSettings().for_target(target).provider == name
        assert provider_of_target(target).name == name
        asked = SessionSettings(provider="cpu", threads=3).for_target(target)
        assert (asked.provider, asked.threads) == ("CPUExecutionProvider", 3)


def test_products_are_not_rounded_to_tf32() -> None:
    assert PROVIDERS["cuda"].options["use_tf32"] == "0"
