"""A run as one page that opens anywhere (HTML), or as Markdown for a pull request.

The page holds the tabs' own modules and style sheet, the views as JSON, the numbers of `analyze --json`, and Plotly:
it is drawn by what draws the tabs, and asks the network for nothing.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import tb_chopper
from tb_chopper.backend import analyze
from tb_chopper.backend.capture import Progress
from tb_chopper.backend.export import differences
from tb_chopper.backend.export.output import open_atomic
from tb_chopper.backend.export.redact import Redactor
from tb_chopper.backend.run import Run
from tb_chopper.backend.views import REGISTRY, text
from tb_chopper.backend.views.palette import COLORS

MAX_ROWS = 300
"""Rows of a table in the page: the largest by its sort column."""
MARKDOWN_ROWS = 10
MODULES = ("page", "dom", "theme", "tooltip")
_IMPORT = re.compile(r'(from|import) "\./([\w-]+)\.js"')
POLICY = ("default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval' data:; style-src 'unsafe-inline'; "
          "img-src data: blob:")


def export(run: Run, path: Path, *, form: str = "html", compare: Run | None = None, redactor: Redactor | None = None,
           progress: Progress | None = None) -> None:
    """Write the report of `run` to `path` (`form`: html or md), beside `compare` where given. Raises Unwritable."""
    views = _once(list(_views(run, compare, progress)))
    name = run.name
    numbers = analyze.of_run(run)
    if redactor:
        views, name, numbers = redactor.tree(views), redactor.text(name), redactor.tree(numbers)
    made = _page(name, views, numbers) if form == "html" else markdown(name, views)
    with open_atomic(path) as out:
        out.write(made.encode())


def _views(run: Run, compare: Run | None, progress: Progress | None) -> Iterator[dict[str, Any]]:
    """Every view as JSON values, the differences first."""
    if compare is not None:
        yield _bounded(differences.view(run, compare).as_dict())
    for i, name in enumerate(REGISTRY):
        if progress:
            progress(i / len(REGISTRY), f"computing {REGISTRY[name].title}")
        yield _bounded(run.view(name, compare=compare).as_dict())


def _once(views: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What every tab says on top (findings, banners) on top of the page alone; the findings' own view lists them."""
    told = max(views, key=lambda v: len(v["findings"]))
    common = [b for b in told["banners"] if sum(b in v["banners"] for v in views) > 1]
    for i, view in enumerate(views):
        view["banners"] = [*(common if i == 0 else []), *(b for b in view["banners"] if b not in common)]
        view["findings"] = told["findings"] if i == 0 or view["name"] == "findings" else []
    return views


# -- what a page can carry --------------------------------------------------------------------------------------------


def _bounded(view: dict[str, Any]) -> dict[str, Any]:
    """Figures bound their points themselves."""
    view["tables"] = {name: _first_rows(table) for name, table in view["tables"].items()}
    return view


def _first_rows(table: dict[str, Any]) -> dict[str, Any]:
    n = len(table["data"][0]) if table["data"] else 0
    if n <= MAX_ROWS:
        return table
    order = list(range(n))
    by = next((i for i, c in enumerate(table["columns"]) if c["name"] == table["sort"]), None)
    if by is not None:
        values = table["data"][by]
        order.sort(key=lambda i: -values[i] if isinstance(values[i], int | float) else math.inf)
    kept = order[:MAX_ROWS]
    note = f"The first {MAX_ROWS} of {n} rows; `tb-chopper export --format csv` writes the tables in full."
    return {**table, "data": [[column[i] for i in kept] for column in table["data"]],
            "note": " ".join(filter(None, (table["note"], note)))}


# -- HTML -------------------------------------------------------------------------------------------------------------


def _page(name: str, views: list[dict[str, Any]], numbers: dict[str, Any]) -> str:
    from plotly.offline import get_plotlyjs

    title = html.escape(f"Chopper: {name}")
    data = {"run": name, "views": views, "colors": COLORS}
    imports = {"imports": {f"chopper/{m}.js": _as_url(source) for m, source in _modules().items()}}
    return f"""<!DOCTYPE html>
<html lang="en" data-theme="light">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{_frontend("style.css")}
{_own("report.css")}
</style>
</head>
<body>
<div class="sticky">
<header class="report-head"><h1>{html.escape(name)}</h1>
<span class="muted">tb-chopper {tb_chopper.__version__}</span><span class="spring"></span>
<button type="button" class="quiet" id="theme">Light or dark</button></header>
<nav class="report-nav" id="nav"></nav>
</div>
<div id="views"></div>
<noscript><p class="report-view">This page draws itself: allow it to run scripts. It loads nothing.</p></noscript>
<script type="application/json" id="report">{_json(data)}</script>
<script type="application/json" id="numbers">{_json(numbers)}</script>
<script>{get_plotlyjs()}</script>
<script type="importmap">{_json(imports)}</script>
<script type="module">
{_own("report.js")}
</script>
</body>
</html>
"""


def _json(value: Any) -> str:
    """JSON that can stand in a script element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _modules() -> dict[str, str]:
    """The tabs' modules that the page needs, by name, importing each other by the names of the import map."""
    found: dict[str, str] = {}
    wanted = list(MODULES)
    while wanted:
        name = wanted.pop()
        if name not in found:
            source = _frontend(f"{name}.js")
            wanted += [m[2] for m in _IMPORT.finditer(source)]
            found[name] = _IMPORT.sub(r'\1 "chopper/\2.js"', source)
    return found


def _as_url(source: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(source.encode()).decode()


def _frontend(name: str) -> str:
    return (resources.files("tb_chopper") / "frontend" / name).read_text(encoding="utf-8")


def _own(name: str) -> str:
    return (resources.files("tb_chopper.backend.export") / name).read_text(encoding="utf-8")


# -- Markdown ---------------------------------------------------------------------------------------------------------


def markdown(name: str, views: list[dict[str, Any]]) -> str:
    """Headlines, key figures and the first rows of the tables."""
    lines = [f"# {_cell(name)}", ""]
    for view in views:
        notes = [line for b in view["banners"] for line in (f"> {_cell(b)}", "")]
        lines += [f"## {view['title']}", "", *notes, _cell(view["headline"]), ""]
        if view["key_figures"]:
            lines += _grid(["", "", ""], [
                [k["label"], _quantity(k["value"], k["unit"]) + _source(k["source"]), k["note"]]
                for k in view["key_figures"]])
        for table in view["tables"].values():
            lines += _table(table)
        if view["name"] == "findings":
            lines += [f"- **{f['severity']}** {_cell(f['message'])}" for f in view["findings"]] + [""]
    return "\n".join(lines)


def _source(source: str) -> str:
    return "" if source == "measured" else f" ({source})"


def _table(table: dict[str, Any]) -> list[str]:
    rows = list(zip(*table["data"], strict=True))
    if not rows:
        return []
    columns = table["columns"]
    by = next((i for i, c in enumerate(columns) if c["name"] == table["sort"]), None)
    if by is not None:
        rows.sort(key=lambda r: -r[by] if isinstance(r[by], int | float) else math.inf)
    shown = [[_quantity(v, c["unit"]) for v, c in zip(row, columns, strict=True)] for row in rows[:MARKDOWN_ROWS]]
    more = f" (first {MARKDOWN_ROWS} of {len(rows)})" if len(rows) > MARKDOWN_ROWS else ""
    return [f"**{_cell(table['title'])}**{more}", "", *_grid([c["label"] for c in columns], shown)]


def _grid(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(_cell(c, 60) for c in line) + " |" for line in lines] + [""]


def _cell(value: str, limit: int = 2000) -> str:
    """Text that Markdown leaves alone."""
    return re.sub(r"([\\`*_\[\]|<>#])", r"\\\1", text.short(value, limit))


_SCALES = {"mhz": "MHz", "w": "W", "j": "J", "per_s": "/s", "factor": "×"}


def _quantity(value: Any, unit: str) -> str:
    if value is None:
        return text.DASH
    if isinstance(value, str | bool):
        return str(value)
    if unit == "us":
        return text.duration(value)
    if unit == "share":
        return text.share(value)
    number = f"{value:,}".replace(",", " ") if isinstance(value, int) else text.digits(value)
    return f"{number} {_SCALES.get(unit, '')}".strip()
