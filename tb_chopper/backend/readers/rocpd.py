"""rocpd databases (`*_results.db`, SQLite), read only and by column name: schema 3 to 4 differ in columns.

The table of processes holds their whole environment: it is never read.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.readers import counter_rows
from tb_chopper.backend.readers.sqlite_file import connect, table
from tb_chopper.backend.schema import CounterFile

_SIZES = [f"{what}_size_{axis}" for what in ("grid", "workgroup") for axis in "xyz"]


def read(path: Path) -> CounterFile:
    """The dispatches of all processes in the database, with their counters where it has any; AGENTS.

    Raises UnreadableFile where it is no rocpd database or damaged.
    """
    try:
        with closing(connect(path)) as database:
            return _read(database, path)
    except sqlite3.Error as error:
        raise UnreadableFile(f"{path}: the rocpd database cannot be read ({error}); convert it where it was written: "
                             "rocpd convert -f csv -i FILE") from error


def _read(database: sqlite3.Connection, path: Path) -> CounterFile:
    dispatches = table(database, "rocpd_kernel_dispatch", [
        "guid", "nid", "pid", "agent_id", "kernel_id", "dispatch_id", "queue_id", "stream_id", "start", "end",
        "event_id", *_SIZES])
    symbols = table(database, "rocpd_info_kernel_symbol", ["guid", "id", "display_name", "kernel_name"])
    processes = table(database, "rocpd_info_process", ["guid", "id", "pid"])
    nodes = table(database, "rocpd_info_node", ["guid", "id", "hostname"])
    if not len(dispatches) and not len(processes):
        raise UnreadableFile(f"{path}: a SQLite database, but not one of rocpd")
    agents, agent_of = _agents(database, processes, nodes)
    dispatches = dispatches.sort_values(["guid", "pid", "dispatch_id"], kind="stable").reset_index(drop=True)

    def looked_up(ids: str, other: pd.DataFrame, value: str) -> pd.Series:
        found = other.drop_duplicates(["guid", "id"]).set_index(["guid", "id"])[value]
        return pd.Series(found.reindex(pd.MultiIndex.from_frame(dispatches[["guid", ids]])).to_numpy())

    name = looked_up("kernel_id", symbols, "display_name")
    name = name.where(name.notna() & (name != ""), looked_up("kernel_id", symbols, "kernel_name"))
    size = dispatches[_SIZES].fillna(1).astype("int64")
    rows = counter_rows.placed(pd.DataFrame({
        "host": looked_up("nid", nodes, "hostname").astype("category"),
        "process": _ints(looked_up("pid", processes, "pid").fillna(dispatches["pid"])),
        "agent": looked_up("agent_id", agent_of, "label").astype("category"),
        "gpu_index": _ints(looked_up("agent_id", agent_of, "gpu_index")),
        "xcc": looked_up("agent_id", agent_of, "xcc").where(lambda x: x > 0).astype("Int64"),
        "dispatch": _ints(dispatches["dispatch_id"]), "queue": _ints(dispatches["queue_id"]),
        "stream": _ints(dispatches["stream_id"]), "name": name.fillna("<unknown kernel>").astype("category"),
        "grid": size[_SIZES[:3]].prod(axis=1), "workgroup": size[_SIZES[3:]].prod(axis=1),
        "start_ns": _ints(dispatches["start"]), "end_ns": _ints(dispatches["end"])}), path)
    counters, findings = _counters(database, dispatches)
    return CounterFile(path, schema.with_counters(rows, counters), agents, "rocprofv3",
                       [f.at(path.name) for f in findings])


def _counters(database: sqlite3.Connection, dispatches: pd.DataFrame) -> tuple[dict[str, np.ndarray], list]:
    events = table(database, "rocpd_pmc_event", ["guid", "event_id", "pmc_id", "value", "sample_id"])
    events = events[events["sample_id"].isna()]  # those with one are samples over time, not of a dispatch
    if not len(events):
        return {}, []
    names = table(database, "rocpd_info_pmc", ["guid", "id", "name"]).drop_duplicates(["guid", "id"])
    name = names.set_index(["guid", "id"])["name"].reindex(pd.MultiIndex.from_frame(events[["guid", "pmc_id"]]))
    place = pd.Series(np.arange(len(dispatches)), pd.MultiIndex.from_frame(dispatches[["guid", "event_id"]]))
    place = place[~place.index.duplicated()]
    number = place.reindex(pd.MultiIndex.from_frame(events[["guid", "event_id"]])).to_numpy()
    known = ~np.isnan(number) & name.notna().to_numpy()
    at = number[known].astype(np.int64)
    counters, findings = counter_rows.combine(
        at, pd.Series(name.to_numpy()[known], dtype="category"), events["value"].to_numpy("float64")[known], at)
    whole = {c: np.concatenate((v, np.full(len(dispatches) - len(v), np.nan))) for c, v in counters.items()}
    return whole, findings


def _agents(database: sqlite3.Connection, processes: pd.DataFrame, nodes: pd.DataFrame,
            ) -> tuple[pd.DataFrame, pd.DataFrame]:
    """AGENTS, and what a dispatch needs of them: guid, id, label, gpu_index, xcc."""
    found = table(database, "rocpd_info_agent", [
        "guid", "id", "nid", "pid", "type", "absolute_index", "logical_index", "type_index", "name", "product_name",
        "extdata"])
    if not len(found):
        return schema.empty(schema.AGENTS), pd.DataFrame(columns=["guid", "id", "label", "gpu_index", "xcc"])
    more = pd.DataFrame([_json(text) for text in found["extdata"]])
    own = pd.DataFrame({"agent_type": found["type"], "node_id": found["absolute_index"],
                        "logical_node_id": found["logical_index"], "name": found["name"],
                        "product_name": found["product_name"]})
    agents = counter_rows.amd_agents(own.combine_first(more))
    is_gpu = agents["gpu_index"] >= 0
    agents["gpu_index"] = _ints(found["type_index"]).where(is_gpu, schema.MISSING)
    host = found.merge(nodes, left_on=["guid", "nid"], right_on=["guid", "id"], how="left")["hostname"]
    pid = found.merge(processes, left_on=["guid", "pid"], right_on=["guid", "id"], how="left")["pid_y"]
    agents = agents.assign(host=pd.Categorical(host), process=_ints(pid.fillna(found["pid"])))
    label = "Agent " + agents["logical_node"].astype(str)
    return schema.conform(agents, schema.AGENTS), found[["guid", "id"]].assign(
        label=label, gpu_index=agents["gpu_index"], xcc=agents["xcc"])


def _json(text: object) -> dict[str, object]:
    try:
        found = json.loads(str(text))
    except ValueError:
        return {}
    return {k: v for k, v in found.items() if not isinstance(v, (dict, list))} if isinstance(found, dict) else {}


def _ints(values: pd.Series) -> pd.Series:
    return pd.to_numeric(values, errors="coerce").fillna(schema.MISSING).astype("int64")
