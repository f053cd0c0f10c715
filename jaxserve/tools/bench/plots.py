"""Plots and pages of benchmarks, on matplotlib, which is imported when something is drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.report import check_target, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
# Okabe and Ito's colors, which color-blind readers tell apart; markers and dashes do without any color.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_TITLE_WIDTH = 70  # characters that fit above one pair of axes
_HANDLE_WIDTH = 7  # in characters, of what stands beside a label of the legend
_ROW_HEIGHT = 0.25  # inches of a row of the legend
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_STYLE = {
    "font.size": 11,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d0d7de",
    "grid.linewidth": 0.7,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "jaxserve",  # equal figures make equal files
}
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }}
h1 {{ font-size: 1.5rem; }}
figure {{ margin: 1.5rem 0; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; font-weight: 600; padding: .3rem 0; }}
th, td {{ border-bottom: 1px solid #d0d7de; padding: .25rem .7rem; text-align: right; white-space: nowrap; }}
th:first-child, td:first-child, .text {{ text-align: left; }}
svg {{ max-width: 100%; height: auto; }}
.wide {{ overflow-x: auto; }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


@dataclass(frozen=True)
class Line:
    """One series. Points with equal x are allowed; they are drawn in the order given."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Mark:
    """A vertical line at `x` with a short text."""

    x: float
    text: str


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        log_x, log_y: a logarithmic axis; ticks stand at the points' x and are written out.
        steps: y changes at its x only, as a count does; no markers.
        mark: a vertical line with a note.
    """

    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    steps: bool = False
    mark: Mark | None = None


@dataclass(frozen=True)
class PageTable:
    """A table of a page; cells are text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def check_plot_target(name: str, flag: str = "plot") -> Path:
    """Returns the path of a plot that will be drawn.

    Raises:
        ConfigError: matplotlib or the folder is missing, or the suffix is unknown.
    """
    path = check_target(name, flag)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"must end in {' or '.join(SUFFIXES)}, got {name}", field=flag, value=name)
    require_matplotlib(flag)
    return path


def require_matplotlib(flag: str) -> None:
    """Raises ConfigError about the flag that asks for a plot if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install '.[bench]' in a checkout", field=flag)


def draw_lines(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    *,
    log_x: bool = False,
    log_y: bool = False,
    steps: bool = False,
    mark: Mark | None = None,
) -> Figure:
    """Returns a figure of lines over one pair of axes; see `Panel`."""
    return draw_panels(title, [Panel(x_label, y_label, lines, log_x, log_y, steps, mark)])


def draw_panels(title: str, panels: Sequence[Panel]) -> Figure:
    """Returns a figure of panels side by side, with one legend below if the first has several lines.

    Lines of equal place look the same in all panels.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8 + 3 * (len(panels) - 1), 4.5), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw(axes, panel)
        width = _TITLE_WIDTH + 26 * (len(panels) - 1)
        figure.get_layout_engine().set(wspace=0.06, h_pad=0.06)
        figure.suptitle("\n".join(fill(part, width) for part in title.splitlines()), fontsize="large")
        if len(panels[0].lines) > 1:
            handles, labels = figure.axes[0].get_legend_handles_labels()
            columns = max(1, min(len(labels), width // (max(map(len, labels)) + _HANDLE_WIDTH)))
            figure.set_figheight(figure.get_figheight() + _ROW_HEIGHT * -(-len(labels) // columns))
            figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=columns)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    for index, line in enumerate(panel.lines):
        axes.plot(
            line.x,
            line.y,
            label=line.label,
            color=COLORS[index % len(COLORS)],
            linestyle=_DASHES[index % len(_DASHES)],
            marker="" if panel.steps else _MARKERS[index % len(_MARKERS)],
            drawstyle="steps-post" if panel.steps else "default",
            linewidth=2,
        )
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    _scale(axes, panel)
    if (mark := panel.mark) is not None:
        axes.axvline(mark.x, color="#57606a", linewidth=1, linestyle=":")
        axes.annotate(
            mark.text,
            (mark.x, 0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            va="bottom",
            rotation=90,
            fontsize=9,
            color="#57606a",
            zorder=1,  # below the lines
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _scale(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    if panel.log_x:
        ticks = sorted({x for line in panel.lines for x in line.x})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks[:: -(-len(ticks) // 12)])
        axes.xaxis.set_minor_formatter(NullFormatter())
    if panel.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure as its suffix says, .png or .svg.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path.suffix.lower() == ".svg":
        write_text(path, '<?xml version="1.0" encoding="utf-8"?>\n' + render_svg(figure), "plot")
        return
    try:
        figure.savefig(path, dpi=150, metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", field="plot", value=str(path)) from error


def render_svg(figure: Figure) -> str:
    """Returns a figure as an SVG element, without facts about its making."""
    import matplotlib as mpl

    file = StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.S)


def write_page(
    path: Path, title: str, tables: Sequence[PageTable], figures: Sequence[Figure], notes: Sequence[str]
) -> None:
    """Writes one HTML file that needs nothing else: no scripts, no links, plots inline.

    Raises:
        ConfigError: the file cannot be written.
    """
    parts = [f"<figure>{render_svg(figure)}</figure>" for figure in figures]
    parts += [_render_table(table) for table in tables]
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    write_text(path, _PAGE.format(title=escape(title), body="\n".join(parts)), "html")


def list_facts(command: str, environment: Mapping[str, object]) -> PageTable:
    """Returns the table that says how a page was made."""
    return PageTable(
        "How this was measured", ("command", command), [(name, str(environment[name])) for name in environment]
    )


def _render_table(table: PageTable) -> str:
    columns = zip(*table.rows, strict=True)
    is_text = [any(cell and not cell[0].isdigit() for cell in column) for column in columns]

    def render_row(cells: Sequence[str], tag: str) -> str:
        kinds = (' class="text"' if left else "" for left in is_text or [False] * len(cells))
        shown = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
        return f"<tr>{''.join(shown)}</tr>"

    rows = [render_row(table.header, "th"), *(render_row(row, "td") for row in table.rows)]
    body = "\n".join(rows)
    return f'<div class="wide"><table><caption>{escape(table.title)}</caption>\n{body}\n</table></div>'
