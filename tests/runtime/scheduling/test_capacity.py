"""How many slots are opened, by memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headport.bundle import Bundle
from headport.errors import BundleError, RequestError
from headport.runner import open_runner
from headport.runtime import Generator
from headport.runtime.scheduling import capacity
from headport.runtime.scheduling.capacity import available_bytes, choose_slots, slot_bytes
from headport.slots import open_slots


@pytest.mark.parametrize("name", ["tiny_bundle", "tiny_lowered"])
def test_bytes_of_a_slot_are_those_that_are_taken(
    name: str, request: pytest.FixtureRequest
) -> None:
    bundle = Bundle.open(request.getfixturevalue(name))
    slots = open_slots(open_runner(bundle), 3, 64)
    # The portable form has no room for padding; the bound holds for both.
    assert slots.nbytes <= 3 * slot_bytes(bundle, 64) <= 2 * slots.nbytes
    if name == "tiny_lowered":
        assert slots.nbytes == 3 * slot_bytes(bundle, 64)


def test_a_cache_of_an_unknown_type_is_not_guessed(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    for port in bundle.manifest.backbone.inputs:
        msgspec.structs.force_setattr(port, "dtype", "float8e4m3fn")
    with pytest.raises(BundleError, match=r"caches of float, .* is float8e4m3fn"):
        slot_bytes(bundle, 64)


@pytest.mark.parametrize(
    ("asked", "each", "available", "count"),
    [
        (0, 10, 1000, 16),
        (0, 100, 1000, 5),  # half of it
        (0, 5000, 1000, 1),  # it may never be filled
        (0, 100, None, 16),
        (0, 0, 1000, 16),
        (40, 10, 1000, 40),
        (3, 100, None, 3),
    ],
)
def test_slots(asked: int, each: int, available: int | None, count: int) -> None:
    assert choose_slots(asked, each, 8192, available) == count


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(RequestError, match=r"4 slots of 8192 tokens take 8\.0 GB, 6\.0 GB are"):
        choose_slots(4, 2_000_000_000, 8192, 6_000_000_000)
    with pytest.raises(RequestError, match="from 1 up, or 0 to choose, -1 was given"):
        choose_slots(-1, 1, 8192, None)


def test_the_smaller_of_machine_and_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, limit, use = (tmp_path / name for name in ("meminfo", "max", "current"))
    memory.write_text("MemTotal: 9 kB\nMemAvailable:   4000 kB\n")
    for name, file in (("_MEMORY", memory), ("_GROUP_LIMIT", limit), ("_GROUP_USE", use)):
        monkeypatch.setattr(capacity, name, file)
    assert available_bytes() == 4_096_000
    use.write_text("1000\n")
    limit.write_text("max\n")
    assert available_bytes() == 4_096_000
    limit.write_text("51000\n")
    assert available_bytes() == 50_000
    memory.unlink()
    assert available_bytes() is None


def test_a_generator_tells_what_it_holds(tiny_lowered: Path) -> None:
    with Generator(tiny_lowered, threads=1, slots=2, max_context=32) as generator:
        assert generator.stats.cache_bytes == 0  # not before it is needed
        generator.generate(["a", "b", "c"], max_new_tokens=3)
        stats = generator.stats
        assert (stats.slots, stats.context, stats.most_rows) == (2, 32, 2)
        assert stats.cache_bytes == 2 * slot_bytes(generator.bundle, 32)


def test_beams_that_do_not_fit_are_refused(
    tiny_lowered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Generator(tiny_lowered, threads=1, slots=1, max_context=32) as generator:
        size = 4 * slot_bytes(generator.bundle, 1 + 5)
        monkeypatch.setattr(capacity, "available_bytes", lambda _: size)
        assert generator.generate([[7]], num_beams=4, max_new_tokens=5)
        monkeypatch.setattr(capacity, "available_bytes", lambda _: size - 1)
        with pytest.raises(RequestError, match=r"4 beams of 6 tokens take 0\.0 GB, 0\.0 GB are"):
            generator.generate([[7]], num_beams=4, max_new_tokens=5)
