"""Plots have what they are given, pages need nothing else, and a missing matplotlib is named."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxserve.errors import ConfigError
from jaxserve.tools.bench import plots
from jaxserve.tools.bench.plots import (
    Line,
    Mark,
    PageTable,
    Panel,
    check_plot_target,
    draw_lines,
    draw_panels,
    render_svg,
    save_figure,
    write_page,
)

pytestmark = pytest.mark.thorough


SVG = "{http://www.w3.org/2000/svg}"


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^plot: .*matplotlib.*pip install '\.\[bench\]'"):
        check_plot_target(str(tmp_path / "x.svg"))


def test_suffixes_and_folders_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^plot: .*\.png or \.svg"):
        check_plot_target(str(tmp_path / "x.pdf"))
    with pytest.raises(ConfigError, match=r"^plot: .*folder"):
        check_plot_target(str(tmp_path / "none" / "x.svg"))


def test_a_figure_has_its_lines_in_different_styles(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [Line(f"line & {index}", [1, 2, 4, 8], [index, 2, 3, 4]) for index in range(4)]
    figure = draw_lines("a < b", "batch", "tokens/s", lines, log_x=True, mark=Mark(4, "ends here"))
    (axes,) = figure.axes
    drawn = axes.get_lines()[:4]
    assert len({line.get_color() for line in drawn}) == len({line.get_marker() for line in drawn}) == 4
    image = ElementTree.fromstring(render_svg(figure))
    texts = {text.text for text in image.iter(f"{SVG}text")}
    assert {"a < b", "batch", "tokens/s", "line & 0", "line & 3", "ends here", "1", "2", "4", "8"} <= texts
    for name, magic in (("x.png", b"\x89PNG"), ("x.svg", b"<?xml")):
        save_figure(figure, check_plot_target(str(tmp_path / name)))
        assert (tmp_path / name).read_bytes().startswith(magic)
    assert render_svg(figure) == render_svg(figure), "equal figures make equal files"


def test_long_titles_are_wrapped() -> None:
    pytest.importorskip("matplotlib")
    figure = draw_lines("word " * 30 + "\nsecond", "x", "y", [Line("", [0, 1], [0, 1])])
    rows = figure.get_suptitle().splitlines()
    assert max(map(len, rows)) <= 70 and rows[-1] == "second" and len(rows) == 4


def test_panels_share_a_title_and_a_legend() -> None:
    pytest.importorskip("matplotlib")
    lines = [Line("a", [1, 2], [3, 4]), Line("b", [1, 2], [5, 6])]
    figure = draw_panels("both", [Panel("x", "in all", lines, mark=Mark(2, "end")), Panel("x", "each", lines)])
    left, right = figure.axes
    assert (left.get_ylabel(), right.get_ylabel(), figure.get_suptitle()) == ("in all", "each", "both")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    colors = [[line.get_color() for line in axes.get_lines()[:2]] for axes in figure.axes]
    assert colors[0] == colors[1] and len(set(colors[0])) == 2
    assert [text.get_text() for text in left.texts] == ["end"] and not right.texts


def test_a_step_line_changes_at_its_points() -> None:
    pytest.importorskip("matplotlib")
    figure = draw_lines("t", "x", "y", [Line("", [0, 1, 2], [0, 1, 2])], steps=True)
    (line,) = figure.axes[0].get_lines()
    assert line.get_drawstyle() == "steps-post" and not figure.legends


def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = [draw_lines(f"figure {index}", "x", "y", [Line("a", [0, 1], [2, 3])]) for index in range(2)]
    table = PageTable("a table", ["name", "tokens/s"], [["<b>", "1,234"]])
    write_page(tmp_path / "x.html", "Sweep & more", [table], figures, ["a note"])
    page = (tmp_path / "x.html").read_text()
    assert page.count("<svg") == 2 and "figure 1" in page and "Sweep &amp; more" in page
    assert '<td class="text">&lt;b&gt;</td><td>1,234</td>' in page and "<p>a note</p>" in page
    assert "<script" not in page and "<link" not in page and "<metadata" not in page
    targets = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert all(target.startswith("#") for target in targets)
