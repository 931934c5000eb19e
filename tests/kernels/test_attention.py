"""CachedAttention as ONNX Runtime runs it: right values, and the same bits however tokens come."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from headport.kernels import DOMAIN, OPTION, VERSION
from headport.session import Session, SessionSettings, open_session

KV_HEADS = 2
SLOTS = 400
LENGTHS = (1, 127, 128, 129, 300, 397)  # about and between the ends of chunks


def _session(folder: Path, library: Path, group: int, size: int, threads: int) -> Session:
    heads = group * KV_HEADS
    cache = f"float[b, {KV_HEADS}, {SLOTS}, {size}]"
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["": 23, "{DOMAIN}": {VERSION}]>
        attention (float[b, t, {heads * size}] q, float[b, t, {KV_HEADS * size}] k,
                   float[b, t, {KV_HEADS * size}] v, {cache} past_key, {cache} past_value,
                   int32[b] lengths, int32[b] added)
          => (float[b, t, {heads * size}] y, {cache} key, {cache} value)
        {{
          y, key, value = {DOMAIN}.CachedAttention
            <num_heads = {heads}, kv_num_heads = {KV_HEADS}, scale = 0.25>
            (q, k, v, past_key, past_value, lengths, added)
        }}
    """)
    file = folder / f"attention-{group}-{size}-{threads}.onnx"
    ir.save(model, file)
    options = {OPTION: str(VERSION)}
    return open_session(file, options, SessionSettings(threads=threads, kernels=library))


class _Rows:
    """Rows whose tokens are given to a session in pieces.

    q, k and v have the shape [B, SLOTS, heads, D], float32.
    """

    def __init__(self, group: int, size: int, rows: int = 2) -> None:
        rng = np.random.default_rng(group)
        self.q = rng.normal(0, 2, (rows, SLOTS, group * KV_HEADS, size)).astype(np.float32)
        kv = rng.normal(0, 1, (2, rows, SLOTS, KV_HEADS, size)).astype(np.float32)
        self.k, self.v = kv
        self.group = group

    def expected(self, row: int, token: int) -> np.ndarray:
        """softmax(q kᵀ / 4) v in float64, shape [heads, D]."""
        past = slice(0, token + 1)
        k, v = (np.repeat(x[row, past].astype(float), self.group, 1) for x in (self.k, self.v))
        scores = np.einsum("hd,jhd->hj", self.q[row, token].astype(float), k) / 4
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out = np.einsum("hj,jhd->hd", weights / weights.sum(1, keepdims=True), v)
        assert isinstance(out, np.ndarray)
        return out

    def run(
        self, session: Session, rows: list[int], past: list[int], added: list[int]
    ) -> np.ndarray:
        """What tokens past … past + added of each row give, shape [B, T, heads, D]."""
        tokens = max(added)

        def given(x: np.ndarray) -> np.ndarray:
            new = np.full((len(rows), tokens, *x.shape[2:]), np.nan, np.float32)
            for i, row in enumerate(rows):
                new[i, : added[i]] = x[row, past[i] : past[i] + added[i]]
            return new.reshape(len(rows), tokens, -1)

        def cached(x: np.ndarray) -> np.ndarray:
            cache = np.full_like(x[rows], np.nan)  # what is behind the past is read by no token
            for i, row in enumerate(rows):
                cache[i, : past[i]] = x[row, : past[i]]
            return np.ascontiguousarray(cache.transpose(0, 2, 1, 3))

        feeds = {"q": given(self.q), "k": given(self.k), "v": given(self.v)}
        feeds |= {"past_key": cached(self.k), "past_value": cached(self.v)}
        feeds |= {"lengths": np.add(past, added, dtype=np.int32) - 1}
        y = session.run(feeds | {"added": np.array(added, np.int32)})["y"]
        for i, count in enumerate(added):
            assert not y[i, count:].any()
        return y.reshape(len(rows), tokens, *self.q.shape[2:])


@pytest.mark.parametrize(("group", "size"), [(1, 64), (2, 32), (3, 64), (4, 8), (5, 20), (8, 16)])
def test_values_and_bits(tmp_path: Path, library: Path, group: int, size: int) -> None:
    rows = _Rows(group, size)
    one, two = (_session(tmp_path, library, group, size, threads) for threads in (1, 2))
    at_once = rows.run(two, [0, 1], [0, 0], [SLOTS, 131])
    np.testing.assert_array_equal(rows.run(one, [0, 1], [0, 0], [SLOTS, 131]), at_once)
    for past in LENGTHS:
        # A token alone is shared by chunks of its past, three are too, a prompt is not.
        for added in (1, 3, 20):
            count = min(added, SLOTS - past)
            found = rows.run(two, [0], [past], [count])[0]
            np.testing.assert_array_equal(found, at_once[0, past : past + count])
        np.testing.assert_allclose(found[0], rows.expected(0, past), atol=2e-5)
    # A row of another length beside it, and one that has nothing new.
    mixed = rows.run(two, [1, 0, 0], [130, 300, 7], [1, 2, 0])
    np.testing.assert_array_equal(mixed[0, :1], at_once[1, 130:131])
    np.testing.assert_array_equal(mixed[1], at_once[0, 300:302])


def test_many_rows_give_what_one_gives(tmp_path: Path, library: Path) -> None:
    rows = _Rows(3, 16)
    session = _session(tmp_path, library, 3, 16, 2)
    alone = rows.run(session, [1], [290], [1])[0]  # shared by chunks
    together = rows.run(session, [1] * 9, [290] * 9, [1] * 9)  # by rows
    for found in together:
        np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("length", [-(2**31), -2, SLOTS, 2**31 - 1])
def test_lengths_that_cannot_be(tmp_path: Path, library: Path, length: int) -> None:
    session = _session(tmp_path, library, 1, 8, 1)
    cache = np.zeros((1, KV_HEADS, SLOTS, 8), np.float32)
    feeds = {name: np.zeros((1, 4, KV_HEADS * 8), np.float32) for name in "qkv"}
    feeds |= {"past_key": cache, "past_value": cache, "added": np.array([3], np.int32)}
    with pytest.raises(Exception, match=f"row 0: 3 new of {length + 1} tokens, in 4 places"):
        session.run(feeds | {"lengths": np.array([length], np.int32)})
