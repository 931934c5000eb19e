"""Recipes of a sweep beside a report: which points stand on the line, and what is refused."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headport.cli import main
from headport.errors import UsageError
from headport.validate.recipes import RecipeSweep, RecipeTrial, check_same_model, read_sweep
from headport.validate.views.page import render_page
from headport.validate.views.recipes import recipes
from headport.validate.views.scatter import Point, front, scatter_plot
from tests.validate.reports import report


def trial(recipe: str, megabytes: float, kl: float, step: float = 1.0) -> RecipeTrial:
    size = round(megabytes * 1e6)
    return RecipeTrial(recipe, size, size, kl, 1.001, 0.99, step)


def swept(**changes: Any) -> RecipeSweep:
    trials = (
        trial("head=int4,block=32", 17, 7e-2, 0.5),
        trial("head=int8,block=64", 29, 4e-4, 0.8),
        trial("head=int8-row<b>", 28, 1.3e-3, 0.9),
        trial("head=fp16", 57, 1e-7, 2.0),
        trial("head=fp8", 30, 2e-2, 3.0),
    )
    best = ("head=int4,block=32", "head=int8,block=64", "head=fp16")
    found = RecipeSweep(report().candidate.checkpoint, 3069, trials, best)
    return msgspec.structs.replace(found, **changes)


def test_the_front_is_what_no_other_point_beats() -> None:
    points = [Point(name, x, y, False) for name, x, y in (
        ("a", 1, 5), ("b", 2, 3), ("beaten", 3, 4), ("c", 3, 1), ("as good as c", 3, 1),
    )]  # fmt: skip
    assert [point.name for point in front(points)] == ["a", "b", "c"]
    assert front([]) == []


def _circles(picture: str) -> list[tuple[float, float, str]]:
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="4.5" class="([\w ]+)">', picture)
    return [(float(x), float(y), name) for x, y, name in found]


def test_points_lie_where_their_figures_say() -> None:
    points = [Point("small", 1.0, 1e-1, True), Point("large", 100.0, 1e-5, False)]
    picture = scatter_plot(points, "label", ("MB", "KL"), 1e-3)
    (x1, y1, plain), (x2, y2, marked) = _circles(picture)
    assert (plain, marked) == ("recipe", "recipe marked"), "marked ones are drawn last"
    assert x2 < x1 and y2 < y1, "smaller is further left, and a larger KL higher up"
    level = re.search(r'<line x1="[\d.]+" y1="([\d.]+)" [^>]*class="diagonal">', picture)
    assert level is not None and y2 < float(level[1]) < y1
    assert picture.count("<title>") == 2 and ">small<" in picture and ">large<" not in picture


def test_names_lie_neither_on_each_other_nor_on_points() -> None:
    points = [Point(f"int8,block={n}", 10.0 + n / 10, 1e-3, True) for n in range(5)]
    points.append(Point("far", 1000.0, 1e-9, True))
    picture = scatter_plot(points, "label", ("MB", "KL"), None)
    names = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*halo">([\w,=]+)<', picture)
    boxes = [(float(x), float(x) + 6 * len(name), float(y) - 9, float(y)) for x, y, name in names]
    boxes += [(x - 4, x + 4, y - 4, y + 4) for x, y, _ in _circles(picture)]
    assert len(boxes) == 12
    for one, other in itertools.combinations(boxes, 2):
        apart = one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]
        of_points = one[1] - one[0] == other[1] - other[0] == 8
        assert apart or of_points, (one, other)
    assert all(left >= 0 and right <= 540 for left, right, _, _ in boxes)


def test_one_recipe_alone_has_a_picture() -> None:
    sweep = swept(trials=(trial("head=int8", 29, 0.0),), pareto=("head=int8",))
    assert len(_circles(recipes(sweep, report()))) == 2


def test_the_page_shows_them() -> None:
    page = render_page(report(), swept())
    assert page.index('id="drift"') < page.index('id="recipes"') < page.index('id="distributions"')
    assert "head=int8-row&lt;b&gt;" in page and "int8-row<b>" not in page
    assert "head=fp16 *" in page and "head=fp8 *" not in page
    assert 'id="recipes"' not in render_page(report())


def test_a_sweep_is_read(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    document = msgspec.to_builtins(swept()) | {"texts": [], "seconds_backbone": 1.0}
    file.write_bytes(msgspec.json.encode(document))
    assert read_sweep(file) == swept()
    for content, says in (
        (b'{"trials": [', "no sweep of recipes"),
        (b"[]", "no sweep of recipes"),
        (msgspec.json.encode(document | {"trials": []}), "at least one recipe was expected"),
        (None, "a sweep was expected: No such file"),
    ):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(UsageError, match=says):
            read_sweep(file)


def test_another_models_recipes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"those of another were found"):
        check_same_model(swept(checkpoint="another"), report())


def test_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, sweep = tmp_path / "report.json", tmp_path / "sweep.json"
    given.write_bytes(msgspec.json.encode(report()))
    sweep.write_bytes(msgspec.json.encode(swept()))
    page = tmp_path / "page.html"
    words = ["report", str(given), "--sweep", str(sweep)]
    assert main([*words, "-o", str(page)]) == 0
    assert "Recipes for the head" in page.read_text()
    capsys.readouterr()
    assert main(words) == 2
    assert "--sweep has no effect without a page" in capsys.readouterr().err
