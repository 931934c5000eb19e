"""Round ticks inside the scale, pixels between its ends."""

from __future__ import annotations

import pytest

from headport.validate.views.plots import percent, plain
from headport.validate.views.scale import Scale, scale_over


def test_linear_ticks_are_round_and_inside() -> None:
    scale = Scale(0.0, 1.0, 10, 110)
    assert scale.ticks() == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert [scale.at(v) for v in (0.0, 0.5, 1.0, 7.0, -1.0)] == [10, 60, 110, 110, 10]


def test_logarithmic_ticks_are_powers_of_ten() -> None:
    scale = Scale(2e-7, 3e-2, 0, 100, logarithmic=True)
    assert scale.ticks() == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
    assert scale.at(0.0) == 0 and 0 < scale.at(1e-5) < 100
    assert [plain(v, 0.0) for v in (1e-6, 0.1)] == ["10⁻⁶", "0.1"]


def test_a_short_logarithmic_axis_has_ticks_too() -> None:
    assert Scale(0.11, 0.6, 0, 1, logarithmic=True).ticks() == pytest.approx(
        [0.2, 0.3, 0.4, 0.5, 0.6]
    )
    assert Scale(3.0, 90.0, 0, 1, logarithmic=True).ticks() == pytest.approx([5, 10, 20, 50])


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [-1.0, 2.0], [1e-30]])
def test_a_scale_has_a_width_whatever_is_on_it(values: list[float]) -> None:
    scale = scale_over(values, (0, 100))
    assert scale.low < min(values) <= max(values) < scale.high
    assert all(0 < scale.at(v) < 100 for v in values)


def test_shares_show_as_many_places_as_their_step_needs() -> None:
    ticks = scale_over([0.9899, 0.9901], (0, 100)).ticks()
    step = ticks[1] - ticks[0]
    assert len({percent(v, step) for v in ticks}) == len(ticks)
    assert percent(1.01, 0.01) == "", "no share is more than all"
