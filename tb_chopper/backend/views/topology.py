"""How the GPUs are linked, which process groups span islands of fast links, and how fast they are there: a part of the
Collectives tab."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.metrics.topology import as_text
from tb_chopper.backend.views import context, figures, text
from tb_chopper.backend.views.palette import COLORS
from tb_chopper.backend.views.view import Missing, Selection, Table, TableColumn

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "fast_link": "NVLink or XGMI: GPUs that are joined by these, directly or through others, are an island.",
    "pcie_link": "Over PCIe on one socket: one bridge (PIX), several (PXB), the host bridge (PHB), the socket (NODE).",
    "socket_link": "From one socket's GPUs to another's (SYS).",
    "unknown_link": "The file does not tell.",
    "islands": "GPUs of the group, by island; missing where the links of one of them are not recorded.",
    "spans": "Whether the group has GPUs of several islands of one host.",
    "busbw": "Σ bytes · f / Σ transfer over the group's messages that are not bound by latency.",
    "within": "The same over all groups inside one island; else 70 % of the links' peak, what well-tuned rings reach.",
    "ratio": "Bus bandwidth of the group / bandwidth inside an island.",
    "transfer": "Transfer of a GPU and step under which it does nothing else, waiting left out; mean.",
    "saved": "What of a step would go at the bandwidth inside an island: of the bare transfers, and what computation "
    "loses beside the others.",
}
KINDS = ("fast_link", "pcie_link", "socket_link", "unknown_link")
KIND_OF = {"NVLink": 0, "XGMI": 0, "PIX": 1, "PXB": 1, "PHB": 1, "NODE": 1, "PCIe": 1, "SYS": 2}
MEANINGS = {"PIX": "one PCIe bridge", "PXB": "several PCIe bridges", "PHB": "the PCIe host bridge",
            "NODE": "PCIe and the socket's interconnect", "SYS": "PCIe and the link between sockets"}
MAX_GPUS = 64
TEXT_GPUS = 16
NVIDIA, AMD = "nvidia-smi topo -m", "amd-smi topology"


def sections(run: Run, selection: Selection) -> tuple[dict[str, go.Figure], dict[str, Table], tuple[Missing, ...]]:
    """Figure, table, or what is missing. Nothing of runs of one GPU, or of none; of the selection only the GPUs count:
    links do not change from step to step."""
    if context.is_cpu_only(run) or run.workers["gpu"].nunique() < 2:
        return {}, {}, ()
    islands = run.topology.islands
    chosen = islands[islands["gpu"].isin(selection.gpus)] if selection.gpus else islands
    drawn = {"links": _links(run.topology.links, chosen)} if len(chosen) > 1 else {}
    return drawn, {"islands": _groups(run)}, () if len(islands) else (_missing(run),)


def _missing(run: Run) -> Missing:
    nvidia = run.workers["gpu_name"].astype(str).str.contains("NVIDIA|Tesla|GeForce", case=False).any()
    return Missing("Islands of GPUs", "No file tells how the GPUs are linked. The sampler (torch_ext.telemetry) writes "
                   "it; or save it beside the traces, one file per host.",
                   f"{NVIDIA if nvidia else AMD} > {run.name}/$(hostname).topology.txt")


def _links(links: pd.DataFrame, islands: pd.DataFrame) -> go.Figure:
    """A matrix of the GPUs in order of their islands."""
    shown = islands.sort_values(["island", "gpu"]).head(MAX_GPUS)
    place = {gpu: i for i, gpu in enumerate(shown["gpu"].tolist())}
    n = len(place)
    kind, words, hover = np.full((n, n), np.nan), np.full((n, n), "", object), np.full((n, n), "", object)
    for row in links[links["gpu_a"].isin(place) & links["gpu_b"].isin(place)].itertuples(index=False):
        for a, b in ((row.gpu_a, row.gpu_b), (row.gpu_b, row.gpu_a)):
            at = place[a], place[b]
            kind[at] = KIND_OF.get(str(row.link), 3)
            words[at] = f"NV{row.n_links}" if row.link == "NVLink" and not pd.isna(row.n_links) else row.link
            hover[at] = _hover(a, b, row)
    colors = [COLORS[k] for k in KINDS]
    scale = [[edge, c] for i, c in enumerate(colors) for edge in (i / 4, (i + 1) / 4)]
    present = [k for i, k in enumerate(KINDS) if (kind == i).any()]
    labels = [f"GPU {gpu}" for gpu in place]
    size = {"tickvals": list(range(n)), "ticktext": labels, "showgrid": False, "zeroline": False}
    n_islands = shown["island"].nunique()
    fig = figures.figure(
        "Links between the GPUs",
        f"{text.count(n_islands, 'island')} of fast links, framed. As recorded on the host."
        + (f" The first {n} of {len(islands)} GPUs." if n < len(islands) else ""),
        height=min(90 + 34 * n, 620),
        legend=[figures.entry(k, DEFINITIONS[k]) for k in present])
    fig.add_trace(go.Heatmap(
        z=kind, zmin=-0.5, zmax=3.5, colorscale=scale, showscale=False, xgap=2, ygap=2, hovertext=hover,
        text=words if n <= TEXT_GPUS else None, texttemplate="%{text}" if n <= TEXT_GPUS else None,
        textfont={"color": "white"}, hovertemplate="%{hovertext}<extra></extra>", hoverongaps=False))
    for _, own in shown.groupby("island"):
        first, last = place[int(own["gpu"].iloc[0])], place[int(own["gpu"].iloc[-1])]
        fig.add_shape(type="rect", x0=first - 0.5, x1=last + 0.5, y0=first - 0.5, y1=last + 0.5,
                      fillcolor="rgba(0,0,0,0)", line={"color": COLORS["island"], "width": 3})
    fig.update_layout(xaxis={**size, "side": "top", "range": [-0.6, n - 0.4]},
                      yaxis={**size, "range": [n - 0.4, -0.6]})
    return fig


def _hover(a: int, b: int, row: object) -> str:
    link, n_links, hops = getattr(row, "link"), getattr(row, "n_links"), getattr(row, "hops")  # noqa: B009
    what = f"{n_links} NVLinks" if link == "NVLink" and not pd.isna(n_links) else MEANINGS.get(link, link)
    return (f"<b>GPU {a} – GPU {b}</b><br>{text.escape(str(what))} ({text.escape(str(link))})"
            + ("" if pd.isna(hops) else f"<br>{hops} hops, as the tool counts"))


def _groups(run: Run) -> Table:
    rows = run.group_islands()
    rows = rows.assign(islands=[as_text(i) or None for i in rows["islands"]],
                       spans=np.where(rows["n_islands"].isna(), text.DASH, np.where(rows["spans"], "yes", "no")),
                       gpus=[as_text([g]) for g in rows["gpus"]])
    return Table("Process groups on links", GROUPS, rows, sort="saved_us")


GROUPS = (
    TableColumn("group", "Group"),
    TableColumn("role", "Role"),
    TableColumn("gpus", "GPUs here", "text"),
    TableColumn("islands", "Islands", "text", DEFINITIONS["islands"]),
    TableColumn("spans", "Spans islands", "text", DEFINITIONS["spans"]),
    TableColumn("busbw_gbs", "Bus GB/s", "", DEFINITIONS["busbw"]),
    TableColumn("within_gbs", "GB/s inside", "", DEFINITIONS["within"]),
    TableColumn("ratio", "Ratio", "share", DEFINITIONS["ratio"]),
    TableColumn("transfer_us", "Bare transfer", "us", DEFINITIONS["transfer"], bar=True),
    TableColumn("saved_us", "Would be saved", "us", DEFINITIONS["saved"] + " Estimated.", bar=True),
    TableColumn("n_hosts", "Hosts", "count", "Hosts that its GPUs here are on; 1 where the traces name none."),
    TableColumn("size", "Ranks", "count", "Ranks of the group."),
    TableColumn("within_source", "Inside is", "text", "Measured, or estimated from the peak of the links."),
)
