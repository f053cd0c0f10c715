"""Plots have what they are given, pages need nothing else, and a missing matplotlib is named."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxserve.bench import plots
from jaxserve.bench.plots import (
    Line,
    Mark,
    PageTable,
    check_plot_target,
    draw_lines,
    render_svg,
    save_figure,
    write_page,
)
from jaxserve.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"plot: plots need matplotlib: pip install 'jaxserve\[bench\]'"):
        check_plot_target(str(tmp_path / "x.svg"))


def test_suffixes_and_folders_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plot: must end in \.png or \.svg"):
        check_plot_target(str(tmp_path / "x.pdf"))
    with pytest.raises(ConfigError, match=r"plot: .* is not a folder"):
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
    rows = figure.axes[0].get_title().splitlines()
    assert max(map(len, rows)) <= 70 and rows[-1] == "second" and len(rows) == 4


def test_a_step_line_changes_at_its_points() -> None:
    pytest.importorskip("matplotlib")
    figure = draw_lines("t", "x", "y", [Line("", [0, 1, 2], [0, 1, 2])], steps=True)
    (line,) = figure.axes[0].get_lines()
    assert line.get_drawstyle() == "steps-post" and figure.axes[0].get_legend() is None


def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = [draw_lines(f"figure {index}", "x", "y", [Line("a", [0, 1], [2, 3])]) for index in range(2)]
    table = PageTable("a table", ["name", "tokens/s"], [["<b>", "1,234"]])
    write_page(tmp_path / "x.html", "Sweep & more", [table], figures, ["a note"])
    page = (tmp_path / "x.html").read_text()
    assert page.count("<svg") == 2 and "figure 1" in page and "Sweep &amp; more" in page
    assert "<td>&lt;b&gt;</td><td>1,234</td>" in page and "<p>a note</p>" in page
    assert "<script" not in page and "<link" not in page and "<metadata" not in page
    targets = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert all(target.startswith("#") for target in targets)
