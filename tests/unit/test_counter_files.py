"""Counter files of every version and kind against what their builder planted, and against real files read twice."""

from __future__ import annotations

import csv
import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.readers import counter_files, ncu_csv, rocpd, rocprof_compute, rocprofv3_csv, rocprofv3_json
from tb_chopper.backend.readers.counter_checks import cycles_per_die

# ---- builders

COLUMNS = {
    "6.2": "Correlation_Id,Dispatch_Id,Agent_Id,Queue_Id,Process_Id,Thread_Id,Grid_Size,Kernel_Name,Workgroup_Size,"
           "LDS_Block_Size,Scratch_Size,VGPR_Count,SGPR_Count,Counter_Name,Counter_Value",
    "6.3": "Correlation_Id,Dispatch_Id,Agent_Id,Queue_Id,Process_Id,Thread_Id,Grid_Size,Kernel_Id,Kernel_Name,"
           "Workgroup_Size,LDS_Block_Size,Scratch_Size,VGPR_Count,SGPR_Count,Counter_Name,Counter_Value,"
           "Start_Timestamp,End_Timestamp",
    "7.0": "Correlation_Id,Dispatch_Id,Agent_Id,Queue_Id,Process_Id,Thread_Id,Grid_Size,Kernel_Id,Kernel_Name,"
           "Workgroup_Size,LDS_Block_Size,Scratch_Size,VGPR_Count,Accum_VGPR_Count,SGPR_Count,Counter_Name,"
           "Counter_Value,Start_Timestamp,End_Timestamp",
    "rocpd": "Guid,Correlation_Id,Dispatch_Id,Agent_Id,Queue_Id,Process_Id,Thread_Id,Grid_Size,Kernel_Id,Kernel_Name,"
             "Workgroup_Size,Lds_Block_Size,Scratch_Size,Vgpr_Count,Accum_Vgpr_Count,Sgpr_Count,Counter_Name,"
             "Counter_Value,Start_Timestamp,End_Timestamp",
}

Planted = list[dict[str, Any]]


def dispatches(n: int = 6) -> Planted:
    """Dispatches of two kernels with planted counters."""
    return [{"dispatch": i + 1, "name": "gemm" if i % 2 else "void f<4, A<1> >(int, char const*)",
             "grid": 256 * (i + 1), "workgroup": 256, "start_ns": 1_000_000 * i, "end_ns": 1_000_000 * i + 600_000,
             "GRBM_GUI_ACTIVE": 8 * 1.2e6 + i, "SQ_WAVES": 4.0 * (i + 1)} for i in range(n)]


def counters_of(planted: Planted) -> list[str]:
    return [c for c in planted[0] if c[0].isupper()]


def write_csv(path: Path, planted: Planted, version: str = "7.0", quote_all: bool = False, per_die: int = 1,
              agent: str = '"Agent 2"', process: int = 4711, tail: str = "") -> Path:
    """A counter_collection file as rocprofv3 writes it; `per_die`: a row for each die, as other tools do."""
    header = COLUMNS[version].split(",")
    lines = [",".join(f'"{h}"' for h in header)]
    for d in planted:
        for counter in counters_of(planted):
            if d.get(counter) is None:
                continue
            known = {"dispatch_id": d["dispatch"], "agent_id": agent, "process_id": process, "grid_size": d["grid"],
                     "kernel_name": f'"{d["name"]}"', "workgroup_size": d["workgroup"], "counter_name": f'"{counter}"',
                     "counter_value": d[counter] / per_die, "start_timestamp": d["start_ns"],
                     "end_timestamp": d["end_ns"], "guid": '"0-1"'}
            fields = [str(known.get(h.lower(), 1)) for h in header]
            row = ",".join(f'"{f.strip(chr(34))}"' if quote_all else f for f in fields)
            lines += [row] * per_die
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n" + tail)
    return path


def write_agents(path: Path, gpus: int = 2, xcc: int = 8, cpus: int = 2) -> Path:
    header = ["Node_Id", "Logical_Node_Id", "Agent_Type", "Num_Xcc", "Cu_Count", "Simd_Count", "Array_Count",
              "Simd_Arrays_Per_Engine", "Wave_Front_Size", "Max_Waves_Per_Cu", "Max_Engine_Clk_Fcompute", "Device_Id",
              "Location_Id", "Domain", "Gpu_Id", "Name", "Product_Name"]
    cpu = [[i, i, "CPU", 1, 96, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, "EPYC", "EPYC"] for i in range(cpus)]
    gpu = [[i, i, "GPU", xcc, 304, 1216, 32, 1, 64, 32, 2100, 29857, 256 * (192 + i) + 8, 0, 9000 + i, "gfx942",
            "AMD Instinct MI300X"] for i in range(cpus, cpus + gpus)]
    with path.open("w", newline="") as stream:
        csv.writer(stream, quoting=csv.QUOTE_NONNUMERIC).writerows([header, *cpu, *gpu])
    return path


def same(table: pd.DataFrame, planted: Planted, columns: list[str] | None = None) -> None:
    """The table holds exactly what was planted."""
    expected = pd.DataFrame(planted)
    assert len(table) == len(expected)
    for column in columns or expected.columns:
        assert table[column].tolist() == expected[column].tolist(), column


# ---- rocprofv3 CSV


@pytest.mark.parametrize("version", COLUMNS)
@pytest.mark.parametrize("quote_all", [False, True])
def test_every_version_of_the_csv(tmp_path, version, quote_all):
    planted = dispatches()
    out = rocprofv3_csv.read(write_csv(tmp_path / "4711_counter_collection.csv", planted, version, quote_all,
                                       agent="2" if version == "6.2" else '"Agent 2"'))
    assert set(schema.counter_names(out.counters)) == {"GRBM_GUI_ACTIVE", "SQ_WAVES"} and not out.findings
    columns = ["dispatch", "name", "grid", "workgroup", "GRBM_GUI_ACTIVE", "SQ_WAVES"]
    same(out.counters, planted, columns + (["start_ns", "end_ns"] if version != "6.2" else []))
    assert set(out.counters["agent"]) == {"Agent 2"} and set(out.counters["process"]) == {4711}
    if version == "6.2":
        assert set(out.counters["start_ns"]) == {schema.MISSING}


def test_rows_in_any_order_and_dispatches_without_one_of_the_counters(tmp_path):
    planted = dispatches()
    planted[3]["SQ_WAVES"] = None
    path = write_csv(tmp_path / "a.csv", planted)
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *sorted(rows, key=hash)]) + "\n")
    out = rocprofv3_csv.read(path).counters
    assert out["dispatch"].tolist() == [1, 2, 3, 4, 5, 6]
    assert np.isnan(out["SQ_WAVES"].iloc[3]) and out["SQ_WAVES"].iloc[4] == 20


def test_rows_per_die_are_summed_and_tell_the_dies(tmp_path):
    planted = dispatches()
    out = rocprofv3_csv.read(write_csv(tmp_path / "a.csv", planted, per_die=8)).counters
    same(out, planted, ["dispatch", "SQ_WAVES"])
    assert out["xcc"].tolist() == [8] * 6
    assert cycles_per_die(out).tolist() == pytest.approx([d["GRBM_GUI_ACTIVE"] / 8 for d in planted])


def test_a_file_merged_with_itself_counts_once(tmp_path):
    planted = dispatches()
    path = write_csv(tmp_path / "a.csv", planted)
    path.write_text(path.read_text() + "\n".join(path.read_text().splitlines()[1:]) + "\n")
    out = rocprofv3_csv.read(path)
    same(out.counters, planted)
    assert [f.code for f in out.findings] == ["counters_twice"]


def test_maxima_and_rates_are_not_summed(tmp_path):
    planted = [{**d, "TCP_GATE_EN1_max": 7.0, "MfmaUtil": 40.0} for d in dispatches()]
    path = write_csv(tmp_path / "a.csv", planted, per_die=1)
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *(r for row in rows for r in [row] * 8)]) + "\n")
    out = rocprofv3_csv.read(path).counters
    assert set(out["TCP_GATE_EN1_max"]) == {7.0} and set(out["MfmaUtil"]) == {40.0}
    assert out["SQ_WAVES"].tolist() == [8 * d["SQ_WAVES"] for d in planted]


def test_a_cut_file_keeps_its_whole_rows(tmp_path):
    planted = dispatches()
    path = write_csv(tmp_path / "a.csv", planted, tail='1,7,"Agent 2",1,4711,1,99,1,"void f<4, A<1> >(in')
    out = rocprofv3_csv.read(path)
    same(out.counters, planted)
    assert not out.complete and [f.code for f in out.findings] == ["file_cut"]


def test_compressed_under_any_name_and_names_of_thousands_of_characters(tmp_path):
    planted = dispatches()
    for d in planted:
        d["name"] = "void f<" + "std::array<char*, 1ul>, " * 250 + "int>()"
    path = write_csv(tmp_path / "a.csv", planted)
    path.write_bytes(gzip.compress(path.read_bytes()))
    same(rocprofv3_csv.read(path).counters, planted)


def test_values_that_are_no_numbers_are_left_out_and_counted(tmp_path):
    path = write_csv(tmp_path / "a.csv", dispatches())
    path.write_text(path.read_text().replace(",4.0,", ",garbage,"))
    out = rocprofv3_csv.read(path)
    assert [(f.code, f.count) for f in out.findings] == [("counter_value_unreadable", 1)]
    assert np.isnan(out.counters["SQ_WAVES"].iloc[0])


@pytest.mark.parametrize(("text", "says"), [
    ("", "empty"),
    ('"Index","KernelName","gpu-id","queue-id","DurationNs"\n0,"k",0,0,5\n', "rocprofv3"),
    ("a,b\n1,2\n", "not a counter_collection"),
])
def test_other_files_are_refused_in_one_line(tmp_path, text, says):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UnreadableFile, match=says) as error:
        rocprofv3_csv.read(tmp_path / "x.csv")
    assert "\n" not in str(error.value) and "x.csv" in str(error.value)


# ---- a folder of files


def test_ranks_passes_hosts_and_agents_by_folders_and_names(tmp_path):
    for number in (1, 2):
        for rank in range(2):
            folder = tmp_path / f"pass_{number}" / "node7"
            write_csv(folder / f"r{rank}_{4000 + rank}_counter_collection.csv", dispatches(), process=4000 + rank,
                      agent=f'"Agent {rank + 2}"')
            write_agents(folder / f"r{rank}_{4000 + rank}_agent_info.csv")
        write_agents(tmp_path / f"pass_{number}" / "node7" / "3999_agent_info.csv")  # the launcher: no dispatches
    (tmp_path / "pass_1" / "node7" / "4000_domain_stats.csv").write_text("Name,Calls\nx,1\n")
    run = counter_files.read(tmp_path)
    assert not run.findings and len(run.counters) == 4 * 6
    groups = run.counters.groupby(["pass", "rank"])
    assert groups.ngroups == 4 and set(run.counters["host"]) == {"node7"}
    assert groups[["process", "gpu_index", "xcc"]].first().to_numpy().tolist() == [
        [4000, 0, 8], [4001, 1, 8]] * 2
    assert cycles_per_die(run.counters).iloc[0] == 1.2e6
    gpu = run.agents[run.agents["gpu_index"] == 1].iloc[0]
    assert (gpu["units"], gpu["xcc"], gpu["pci_address"], gpu["kfd_id"]) == (304, 8, "0000:c3:01.0", 9003)


def test_a_bad_file_does_not_cost_the_others(tmp_path):
    write_csv(tmp_path / "1_counter_collection.csv", dispatches())
    (tmp_path / "2_counter_collection.csv").write_text('"Index","KernelName","gpu-id"\n0,"k",0\n')
    (tmp_path / "3_results.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 500)
    (tmp_path / ".rocprofv3").mkdir()
    (tmp_path / ".rocprofv3" / "1-2-kernel.dat").write_bytes(b"x")
    run = counter_files.read(tmp_path)
    assert len(run.counters) == 6
    assert sorted(f.code for f in run.findings) == [
        "profiler_leftovers", "unreadable_file", "unreadable_file", "xcc_assumed"]


def test_dies_by_the_clock_only_where_it_tells(tmp_path):
    long = write_csv(tmp_path / "a" / "x_counter_collection.csv", dispatches())
    run = counter_files.read(long.parent)
    assert run.counters["xcc"].tolist() == [8] * 6 and [f.code for f in run.findings] == ["xcc_assumed"]
    short = [{**d, "end_ns": d["start_ns"] + 3000, "GRBM_GUI_ACTIVE": 14000.0} for d in dispatches()]
    run = counter_files.read(write_csv(tmp_path / "b" / "x_counter_collection.csv", short).parent)
    assert run.counters["xcc"].isna().all() and cycles_per_die(run.counters).isna().all()


@pytest.mark.parametrize(("change", "code", "count"), [
    (lambda d, i: {"SQ_WAVES": 0.0}, "counter_not_collected", 6),
    (lambda d, i: {"SQ_INSTS_VALU_MFMA_MOPS_F8": 0.0}, "counter_all_zero", 6),
    (lambda d, i: {"end_ns": d["start_ns"] - 5} if i == 2 else {}, "dispatch_time_bad", 1),
    (lambda d, i: {"SQ_WAVES": d["SQ_WAVES"] * 2} if i == 2 else {}, "waves_unexpected", 1),
    (lambda d, i: {"SQ_WAVES": 9.0 if i == 2 else 3.0, "grid": -1, "name": "k"}, "counter_spread", 1),
    (lambda d, i: {"GRBM_GUI_ACTIVE": 3e7} if i == 2 else {}, "clock_impossible", 1),
])
def test_values_that_cannot_be_right_are_named(tmp_path, change, code, count):
    planted = [{**d, **change(d, i)} for i, d in enumerate(dispatches())]
    write_csv(tmp_path / "1_counter_collection.csv", planted)
    write_agents(tmp_path / "1_agent_info.csv")
    run = counter_files.read(tmp_path)
    assert [(f.code, f.count) for f in run.findings] == [(code, count)]
    if code == "counter_not_collected":
        assert run.counters["SQ_WAVES"].isna().all()
    if code == "dispatch_time_bad":
        assert run.counters["start_ns"].tolist().count(schema.MISSING) == 1


# ---- JSON


def json_file(planted: Planted, instances: int = 8) -> dict[str, Any]:
    ids = {c: 100 + i for i, c in enumerate(counters_of(planted))}
    names = list(dict.fromkeys(d["name"] for d in planted))
    return {"rocprofiler-sdk-tool": [{
        "metadata": {"pid": 4711, "node": {"hostname": "node7"}, "command": ["python", "--token=secret"]},
        "agents": [{"id": {"handle": 50 + i}, "type": 1 if i == 0 else 2, "node_id": i, "logical_node_id": i,
                    "num_xcc": 8, "cu_count": 304, "name": "gfx942"} for i in range(3)],
        "counters": [{"id": {"handle": h}, "name": c, "agent_id": {"handle": 51}} for c, h in ids.items()],
        "strings": {"callback_records": [{"kind": "NONE"}]},
        "kernel_symbols": [{"kernel_id": 0, "kernel_name": ""}, *(
            {"kernel_id": 7 + i, "kernel_name": n + ".kd", "formatted_kernel_name": n} for i, n in enumerate(names))],
        "callback_records": {"counter_collection": [{
            "thread_id": 1, "dispatch_data": {
                "start_timestamp": d["start_ns"], "end_timestamp": d["end_ns"], "dispatch_info": {
                    "agent_id": {"handle": 52}, "queue_id": {"handle": 1}, "kernel_id": 7 + names.index(d["name"]),
                    "dispatch_id": d["dispatch"], "workgroup_size": {"x": d["workgroup"], "y": 1, "z": 1},
                    "grid_size": {"x": d["grid"] // 2, "y": 2, "z": 1}}},
            "records": [{"counter_id": {"handle": h}, "value": d[c] / instances} for c, h in ids.items()
                        for _ in range(instances)],
        } for d in reversed(planted)]},
        "buffer_records": {"hip_api": [{"size": 1}]}}]}


@pytest.mark.parametrize("as_object", [False, True])
def test_json_sums_the_instances(tmp_path, as_object):
    planted = dispatches()
    content = json_file(planted)
    if as_object:
        content["rocprofiler-sdk-tool"] = content["rocprofiler-sdk-tool"][0]
    (tmp_path / "4711_results.json").write_text(json.dumps(content))
    run = counter_files.read(tmp_path)
    same(run.counters, planted)
    assert set(run.counters["gpu_index"]) == {1} and set(run.counters["xcc"]) == {8}
    assert set(run.counters["process"]) == {4711} and set(run.counters["host"]) == {"node7"}
    assert "secret" not in run.counters.to_csv() + run.agents.to_csv()


def test_a_cut_json_is_refused_with_a_remedy(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(json_file(dispatches()))[:-200])
    with pytest.raises(UnreadableFile, match="-f csv"):
        rocprofv3_json.read(path)


# ---- rocpd


def write_rocpd(path: Path, planted: Planted, per_instance: int = 8, extra: str = "") -> Path:
    """A database of the tables that matter; `extra`: columns of later schemas."""
    guid = "g-1"
    with sqlite3.connect(path) as db:
        db.executescript(f"""
            CREATE TABLE rocpd_kernel_dispatch (id, guid, nid, pid, tid, agent_id, kernel_id, dispatch_id, queue_id,
                stream_id, start, "end", workgroup_size_x, workgroup_size_y, workgroup_size_z, grid_size_x,
                grid_size_y, grid_size_z, event_id{extra});
            CREATE TABLE rocpd_info_kernel_symbol (id, guid, kernel_name, display_name);
            CREATE TABLE rocpd_info_process (id, guid, pid, environment, command);
            CREATE TABLE rocpd_info_node (id, guid, hostname);
            CREATE TABLE rocpd_info_agent (id, guid, nid, pid, type, absolute_index, logical_index, type_index, name,
                product_name, extdata);
            CREATE TABLE rocpd_pmc_event (id, guid, event_id, pmc_id, value{extra});
            CREATE TABLE rocpd_info_pmc (id, guid, name);""")
        db.execute("INSERT INTO rocpd_info_process VALUES (9, ?, 4711, 'TOKEN=secret', 'python')", [guid])
        db.execute("INSERT INTO rocpd_info_node VALUES (1, ?, 'node7')", [guid])
        for i, kind in enumerate(("CPU", "GPU", "GPU")):
            db.execute("INSERT INTO rocpd_info_agent VALUES (?,?,1,9,?,?,?,?,?,'MI300X',?)", [
                i, guid, kind, i, i, max(i - 1, 0), "gfx942", json.dumps({"num_xcc": 8, "cu_count": 304})])
        for i, counter in enumerate(counters_of(planted)):
            db.execute("INSERT INTO rocpd_info_pmc VALUES (?,?,?)", [i, guid, counter])
        for n, d in enumerate(planted):
            db.execute("INSERT INTO rocpd_info_kernel_symbol VALUES (?,?,?,?)", [n, guid, d["name"] + ".kd", d["name"]])
            db.execute(f"INSERT INTO rocpd_kernel_dispatch VALUES ({','.join('?' * (19 + bool(extra)))})", [
                n, guid, 1, 9, 1, 2, n, d["dispatch"], 3, 4, d["start_ns"], d["end_ns"], d["workgroup"], 1, 1,
                d["grid"], 1, 1, 100 + n, *([None] if extra else [])])
            for i, counter in enumerate(counters_of(planted)):
                for _ in range(per_instance):
                    db.execute(f"INSERT INTO rocpd_pmc_event VALUES ({','.join('?' * (5 + bool(extra)))})", [
                        0, guid, 100 + n, i, d[counter] / per_instance, *([None] if extra else [])])
        if extra:  # a sample over time, which is no value of the dispatch
            db.execute("INSERT INTO rocpd_pmc_event VALUES (0, ?, 100, 0, 1e9, 5)", [guid])
    return path


@pytest.mark.parametrize("extra", ["", ", sample_id"])
def test_rocpd_by_column_names_and_without_the_environment(tmp_path, extra):
    planted = dispatches()
    write_rocpd(tmp_path / "4711_results.db", planted, extra=extra)
    before = sorted(tmp_path.iterdir())
    run = counter_files.read(tmp_path)
    same(run.counters, planted)
    assert set(run.counters["gpu_index"]) == {1} and set(run.counters["xcc"]) == {8}
    assert set(run.counters["process"]) == {4711} and set(run.counters["host"]) == {"node7"}
    assert "secret" not in run.counters.to_csv() + run.agents.to_csv()
    assert sorted(tmp_path.iterdir()) == before


def test_a_database_of_something_else_is_passed_over(tmp_path):
    with sqlite3.connect(tmp_path / "other.db") as db:
        db.execute("CREATE TABLE cookies (a)")
    assert counter_files.reader_of(tmp_path / "other.db") is None
    with pytest.raises(UnreadableFile, match="not one of rocpd"):
        rocpd.read(tmp_path / "other.db")


# ---- rocprof-compute


def test_pmc_perf_is_wide_and_its_copies_of_columns_are_left_out(tmp_path):
    planted = dispatches()
    header = ["Dispatch_ID", "GPU_ID", "Grid_Size", "Workgroup_Size", "LDS_Per_Workgroup", "Arch_VGPR", "Wave_Size",
              "Kernel_Name", "Kernel_ID", "GRBM_GUI_ACTIVE", "SQ_WAVES", "Start_Timestamp", "End_Timestamp",
              "GRBM_GUI_ACTIVE_13", "Kernel_ID_1", "TCC_HIT[0]"]
    with (tmp_path / "pmc_perf.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *(
            [d["dispatch"], 4, d["grid"], d["workgroup"], 0, 8, 64, d["name"], 1, d["GRBM_GUI_ACTIVE"], d["SQ_WAVES"],
             d["start_ns"], d["end_ns"], 5, 1, 17] for d in planted)])
    (tmp_path / "sysinfo.csv").write_text("gpu_model,gpu_arch,cu_per_gpu,num_xcd,max_sclk\nMI308X,gfx942,80,1,2100\n")
    out = rocprof_compute.read(tmp_path / "pmc_perf.csv")
    same(out.counters, planted)
    assert schema.counter_names(out.counters) == ["GRBM_GUI_ACTIVE", "SQ_WAVES", "TCC_HIT[0]"]
    assert out.counters["xcc"].isna().all()  # sysinfo says 1 die for a GPU of 4
    gpu = out.agents.iloc[0]
    assert (gpu["product"], gpu["units"], gpu["xcc"], gpu["max_clock_mhz"]) == ("MI308X", 80, -1, 2100)
    assert len(counter_files.read(tmp_path).counters) == 6


# ---- Nsight Compute


def ncu_raw(values: dict[str, list[str]], units: dict[str, str], before: str = "") -> str:
    context = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size",
               "Grid Size", "Device", "CC"]
    n = len(next(iter(values.values())))
    rows = [[*context, *values], [""] * len(context) + [units.get(m, "") for m in values]]
    rows += [[str(i), "77", "python", "node7", f"k{i}", "1", "7", "(256, 1, 1)", "(10, 2, 1)", "0", "9.0",
              *(v[i] for v in values.values())] for i in range(n)]
    return before + "".join(",".join(f'"{c}"' for c in row) + "\n" for row in rows)


@pytest.mark.parametrize(("duration", "unit", "rate"), [
    ("1,234,567", "ns", "65.77"),
    ("1.234.567", "ns", "65,77"),  # a German or French machine
    ("1,234.567", "us", "65.77"),
    ("1.234567", "ms", "65.77"),
    ("1 234 567", "nsecond", "65,77"),
])
def test_units_and_locales_of_nsight(tmp_path, duration, unit, rate):
    metrics = {"gpu__time_duration.sum": [duration], "sm__warps_active.avg.pct_of_peak_sustained_active": [rate],
               "broken": ["n/a"]}
    path = tmp_path / "ncu.csv"
    path.write_text(ncu_raw(metrics, {"gpu__time_duration.sum": unit, "sm__warps_active": "%"},
                            before="epoch 1\n==PROF== Connected to process 77\n"))
    out = ncu_csv.read(path).counters
    assert out["gpu__time_duration.sum"].tolist() == pytest.approx([1_234_567])
    assert out["sm__warps_active.avg.pct_of_peak_sustained_active"].tolist() == [65.77]
    assert "broken" not in out and (out["grid"].iloc[0], out["workgroup"].iloc[0]) == (5120, 256)
    assert counter_files.reader_of(path) is ncu_csv.read


def test_an_empty_report_says_why(tmp_path):
    (tmp_path / "a.csv").write_text("==PROF== nothing\n")
    with pytest.raises(UnreadableFile, match="--csv --page raw"):
        ncu_csv.read(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text(ncu_raw({"m": []}, {}))
    with pytest.raises(UnreadableFile, match="no kernel matched"):
        ncu_csv.read(tmp_path / "b.csv")


# ---- real files


def read_plainly(path: Path) -> dict[tuple[int, str], float]:
    """(dispatch, counter) -> sum of the values, by the standard library alone."""
    out: dict[tuple[int, str], float] = {}
    csv.field_size_limit(1 << 24)
    with path.open(newline="") as stream:
        for row in csv.DictReader(stream):
            key = int(row["Dispatch_Id"]), row["Counter_Name"]
            out[key] = out.get(key, 0.0) + float(row["Counter_Value"])
    return out


def test_real_csv_files_have_every_value(shared):
    files = sorted(p for p in (shared / "counters").rglob("*.csv") if "counter_collection" in p.name
                   or p.name == "kernel_names.csv")
    assert len(files) == 15
    for path in files:
        table, plain = rocprofv3_csv.read(path).counters, read_plainly(path)
        long = {(d, c): v for c in schema.counter_names(table)
                for d, v in zip(table["dispatch"], table[c], strict=True) if not np.isnan(v)}
        assert long == pytest.approx(plain), path


def test_json_and_rocpd_equal_the_csv_that_they_were_made_of(shared):
    folder = shared / "counters"
    for other, original in (
            (rocprofv3_json.read(folder / "rocprofv3_json" / "results_from_csv.json.gz"), "gemm_256_64/lds_conflict"),
            (rocpd.read(folder / "rocpd" / "counters_from_csv.db"), "ds_write_b64/hit_rate")):
        expected = rocprofv3_csv.read(folder / "rocprofv3_mi355x" / f"{original}_counter_collection.csv").counters
        columns = ["dispatch", "name", "grid", "workgroup", "start_ns", "end_ns", *schema.counter_names(expected)]
        same(other.counters, expected[columns].to_dict("records"))


def test_a_real_folder_of_one_node(shared):
    run = counter_files.read(shared / "counters" / "rocprofv3_mi355x")
    assert set(run.counters["gpu_index"]) == {0} and set(run.counters["xcc"]) == {8}  # Agent 2 behind two CPUs
    assert "error" not in {f.severity for f in run.findings}


def test_real_nsight_pages(shared):
    folder = shared / "counters" / "ncu_csv"
    details = ncu_csv.read(folder / "copy_blocked_details.csv").counters.iloc[0]
    assert details["gpu__time_duration.sum"] == 21_058_944
    assert details["gpc__cycles_elapsed.avg.per_second"] == 584_998_877.44
    assert (details["Memory Throughput"], details["Memory Throughput [byte/s]"]) == (61.84, 196_456_177_859.63)
    raw = ncu_csv.read(folder / "CuVectorAddDrv_raw.csv")
    assert raw.counters["gpu__time_duration.sum"].iloc[0] == 3232
    assert (raw.agents["units"].iloc[0], raw.agents["product"].iloc[0]) == (46, "NVIDIA GeForce RTX 3070")


def test_repeated_rows_and_summed_clocks_as_reported(shared):
    case = shared / "cases" / "41_counters_xcc_rows"
    expected = json.loads((case / "expected.json").read_text())
    run = counter_files.read(case / "run").counters
    assert run["SQ_INSTS_VALU"].tolist() == expected["SQ_INSTS_VALU"]
    assert cycles_per_die(run).iloc[0] == expected["GRBM_GUI_ACTIVE"]
    summed = counter_files.read(case / "run2")
    clock = cycles_per_die(summed.counters) / (summed.counters["end_ns"] - summed.counters["start_ns"]) * 1000
    assert clock.tolist() == pytest.approx([expected["run2_clock_mhz"]])
    assert [f.code for f in summed.findings] == ["xcc_assumed"]


def test_bad_values_as_reported(shared):
    case = shared / "cases" / "43_counters_bad_values"
    expected = json.loads((case / "expected.json").read_text())
    run = counter_files.read(case / "run")
    assert run.counters["SQ_WAVES"].median() == expected["SQ_WAVES_median"]
    assert run.counters["GRBM_GUI_ACTIVE"].median() == expected["GRBM_median"]
    assert {f.code for f in run.findings} == {"waves_unexpected", "counter_spread"}


def test_agents_are_not_gpus_as_reported(shared):
    case = shared / "cases" / "45_agents_to_devices"
    expected = json.loads((case / "expected.json").read_text())
    run = counter_files.read(case / "run")
    trace = run.dispatches
    busy = (trace["end_ns"] - trace["start_ns"]).groupby(trace["gpu_index"]).sum()
    gpus = sorted(run.agents.loc[run.agents["gpu_index"] >= 0, "gpu_index"])
    assert [int(busy.get(gpu, 0)) for gpu in gpus] == expected["gpu_busy_ns"]
