"""The operator behind candidates, on one channel, where a token's exact logit is its weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from headport.errors import RunError
from headport.kernels import CANDIDATES, DOMAIN, OPTION, VERSION
from headport.session import Session, SessionSettings, open_session


def _operator(folder: Path, library: Path, count: int = 3) -> Session:
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["": 23, "{DOMAIN}": {VERSION}]>
        ranked (float[n, h] x, float[n, v] upper, float[r, c] noise, float[n, v] logits,
                float[v, h] weight, double[t] terms, float[b] bias, int64[f] firsts)
          => (int64[n, m] ids, double[n, m] z, double[n] lse, int64[n] k, double[n] cut,
              double[n] error)
        {{
          ids, z, lse, k, cut, error = {DOMAIN}.{CANDIDATES} <count = {count}, certified = 1>
            (x, upper, noise, logits, weight, terms, bias, firsts)
        }}
    """)
    ir.save(model, folder / "ranked.onnx")
    settings = SessionSettings(threads=2, kernels=library)
    return open_session(folder / "ranked.onnx", {OPTION: str(VERSION)}, settings)


def _feeds(upper: list[list[float]], **changes: np.ndarray) -> dict[str, np.ndarray]:
    """Of one channel, where a token's exact logit is its weight."""
    keys = np.array(upper, np.float32)
    n, v = keys.shape
    return {
        "x": np.ones((n, 1), np.float32),
        "upper": keys,
        "noise": np.zeros((1, 1), np.float32),
        "logits": keys,
        "weight": np.arange(v, dtype=np.float32)[:, None],
        "terms": np.array([1.0, 0.0, 0.0, 0.0]),
        "bias": np.zeros(v, np.float32),
        "firsts": np.arange(v),
    } | changes


def test_equal_keys_and_equal_logits_go_by_their_ids(tmp_path: Path, library: Path) -> None:
    session = _operator(tmp_path, library)
    found = session.run(_feeds([[1, 1, 1, 1, 1, 1], [0, 9, 0, 9, 9, 0]]))
    assert found["ids"].tolist() == [[2, 1, 0], [4, 3, 1]] and found["cut"].tolist() == [1, 0]
    assert found["z"].tolist() == [[2, 1, 0], [4, 3, 1]] and found["k"].tolist() == [1, 3]
    flat = _feeds([[9, 0, 9, 9, 0, 9]], weight=np.full((6, 1), 5, np.float32))
    found = session.run(flat)
    # Token 5 ends the list, and nothing tells the others' order unless their rows are equal.
    assert (found["ids"].tolist(), found["k"].tolist()) == ([[0, 2, 3]], [0])
    alike = flat | {"upper": np.array([[4.5, 0, 4, 4, 0, 3]], np.float32)}
    assert session.run(alike)["k"].tolist() == [0]
    assert session.run(alike | {"firsts": np.zeros(6, np.int64)})["k"].tolist() == [3]


@pytest.mark.parametrize(
    ("upper", "changes", "k", "cut"),
    [
        ([0, 0, 2.75, 9, 9, 9], {"terms": np.array([1, 0, 0, 0.2])}, 3, 2.75),
        ([0, 0, 2.75, 9, 9, 9], {"terms": np.array([1, 0, 0, 0.3])}, 2, 2.75),
        ([0, 0, 0, 9, 9, 9], {"terms": np.array([1, 0, 0, 0.4])}, 3, 0),
        ([0, 0, 0, 9, 9, 9], {"terms": np.array([1, 0, 0, 0.6])}, 0, 0),
        ([0, 0, 0, 9, 9, 9], {"x": np.full((1, 1), 2.0**59, np.float32)}, 3, 0),
        ([0, 0, 0, 9, 9, 9], {"x": np.full((1, 1), 2.0**60, np.float32)}, 0, np.inf),
    ],
)
def test_what_is_within_the_error_is_not_proved(
    tmp_path: Path,
    library: Path,
    upper: list[float],
    changes: dict[str, np.ndarray],
    k: int,
    cut: float,
) -> None:
    """Exact logits of the candidates are 5, 4 and 3."""
    found = _operator(tmp_path, library).run(_feeds([upper], **changes))
    assert (found["k"].tolist(), found["cut"].tolist()) == ([k], [cut])


def test_a_logit_that_is_no_number_comes_first_and_proves_nothing(
    tmp_path: Path, library: Path
) -> None:
    weight = np.arange(6, dtype=np.float32)[:, None]
    weight[3] = np.nan
    found = _operator(tmp_path, library).run(_feeds([[0, 0, 0, 9, 9, 9]], weight=weight))
    assert found["ids"].tolist() == [[3, 5, 4]] and np.isnan(found["z"][0, 0])
    assert found["k"].tolist() == [0] and np.isnan(found["lse"]).all()


def test_keys_that_are_no_numbers_are_looked_at(tmp_path: Path, library: Path) -> None:
    upper = np.zeros((1, 40), np.float32)
    upper[0, [3, 17, 38]] = np.nan, np.inf, np.nan
    found = _operator(tmp_path, library).run(_feeds(upper.tolist(), logits=np.zeros_like(upper)))
    assert found["ids"].tolist() == [[38, 17, 3]]
    upper[0, 20] = np.nan  # one more than there is room for: nothing is known
    found = _operator(tmp_path, library).run(_feeds(upper.tolist(), logits=np.zeros_like(upper)))
    assert (found["k"].tolist(), found["cut"].tolist()) == ([0], [np.inf])


def test_logits_far_above_the_candidates_overflow_nothing(tmp_path: Path, library: Path) -> None:
    logits = np.zeros((1, 40), np.float32)
    logits[0, 0] = 500.0
    upper = np.arange(40, dtype=np.float32)[None]
    found = _operator(tmp_path, library).run(_feeds(upper.tolist(), logits=logits))
    assert found["lse"].tolist() == [500.0]
    logits = np.roll(logits, 36, axis=1)  # behind the last whole register of what is not picked
    found = _operator(tmp_path, library).run(_feeds(upper.tolist(), logits=logits))
    assert found["lse"].tolist() == [500.0]
    large = np.full((1, 1), 3.0**24, np.float32)  # float32 rounds three times it down
    found = _operator(tmp_path, library).run(_feeds(upper.tolist(), x=large, logits=logits * 0))
    np.testing.assert_allclose(found["lse"], [39 * 3.0**24], rtol=1e-7)
    # A candidate's own quantised logit counts for nothing, however large.
    logits[0] = np.where(np.arange(40) == 38, 500, 0)
    found = _operator(tmp_path, library).run(_feeds(upper.tolist(), logits=logits))
    exact = np.log(np.exp([39.0, 38, 37]).sum() + 37)
    np.testing.assert_allclose(found["lse"], [exact], rtol=1e-7)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 6), (2, 6)])
def test_noise_of_every_form(tmp_path: Path, library: Path, shape: tuple[int, int]) -> None:
    noise = np.zeros(shape, np.float32)
    noise[-1, -1] = 4
    found = _operator(tmp_path, library).run(_feeds([[5, 4, 3, 2, 1, 0.5]] * 2, noise=noise))
    moved = shape[1] == 6
    assert sorted(found["ids"][1].tolist()) == ([0, 1, 5] if moved else [0, 1, 2])
    assert found["cut"][1] == (3 if moved else 2 + 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"noise": np.zeros((3, 1), np.float32)},
            r"noise \[1, 1\], \[N, 1\], \[1, V\] or",
        ),
        ({"weight": np.zeros((3, 1), np.float32)}, r"V above 3, which is at least 1"),
        ({"weight": np.zeros((6, 2), np.float32)}, r"x \[N, H\] and a weight \[V, H\]"),
        ({"logits": np.zeros((1, 6), np.float32)}, r"logits of 12 elements was expected, 6 were"),
        ({"terms": np.zeros(3)}, r"terms of 4 elements was expected"),
        ({"bias": np.zeros(5, np.float32)}, r"bias of 6 elements was expected"),
        ({"firsts": np.zeros(7, np.int64)}, r"firsts of 6 elements was expected"),
    ],
    ids=["noise", "few", "width", "logits", "terms", "bias", "firsts"],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, library: Path, changes: dict[str, np.ndarray], message: str
) -> None:
    session = _operator(tmp_path, library)
    with pytest.raises(RunError, match=message):
        session.run(_feeds([[5, 4, 3, 2, 1, 0.5]] * 2, **changes))
