"""Counter passes as rocprofv3 writes them: the training run again, three counters a time, kernels one by one.

A pass is another process: other ids, other times (boot clock), another clock frequency, more warm-up dispatches at
its start and, where asked, some dispatches missing or in another order between streams. Values are summed over the
GPU's dies, one row per dispatch and counter.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from tb_chopper.backend.simulate import physics
from tb_chopper.backend.simulate.config import Config, Gpu
from tb_chopper.backend.simulate.program import Item
from tb_chopper.backend.simulate.recorded import Rank, boot_ns
from tb_chopper.backend.simulate.sidecar import pci_address

DIRECTORY = "counters"
COUNTERS = (
    ("GRBM_GUI_ACTIVE", "SQ_WAVES", "SQ_BUSY_CU_CYCLES"),
    ("GRBM_GUI_ACTIVE", "SQ_VALU_MFMA_BUSY_CYCLES", "SQ_INSTS_VALU_MFMA_MOPS_BF16"),
    ("GRBM_GUI_ACTIVE", "TCC_HIT_sum", "TCC_MISS_sum"),
)
"""By pass."""
FLOP_PER_MOP, FLOP_PER_BUSY_CYCLE, WAVE, LINE_BYTES = 512, 512, 64, 128
CPU_NODES = 2
SURPLUS = 37
"""Warm-up dispatches of the first pass beyond those of the training; later passes have more."""
DISPATCH_NS, TIMESTAMP_NS = 55_000, 40
PASS_APART_NS = 600_000_000_000
COUNTER_CLOCK = 0.96
"""Clock of a counter run as a share of the maximum: one kernel at a time rarely meets the power cap."""

_COLUMNS = (
    "Correlation_Id", "Dispatch_Id", "Agent_Id", "Queue_Id", "Process_Id", "Thread_Id", "Grid_Size", "Kernel_Id",
    "Kernel_Name", "Workgroup_Size", "LDS_Block_Size", "Scratch_Size", "VGPR_Count", "Accum_VGPR_Count", "SGPR_Count",
    "Counter_Name", "Counter_Value", "Start_Timestamp", "End_Timestamp",
)
_DISPATCH = ("rank", "pass", "dispatch_id", "step", "correlation")
_NOT_IN_6_2 = {"Kernel_Id", "Accum_VGPR_Count", "Start_Timestamp", "End_Timestamp"}


def write(directory: Path, rank: Rank) -> tuple[list[str], pd.DataFrame]:
    """Write all passes of a rank; returns the files, relative to the run, and which kernel each dispatch was:
    rank, pass, dispatch_id, step, correlation (-1: surplus warm-up). None under tensor or pipeline parallelism: where
    kernels run one by one, ranks that use several communicators wait for each other for ever."""
    files: list[str] = []
    dispatches = [pd.DataFrame(columns=list(_DISPATCH), dtype="int64")]
    for number in range(1, rank.config.counter_passes + 1 if _possible(rank.config) else 1):
        folder = directory / DIRECTORY / f"pass_{number}" / rank.host
        folder.mkdir(parents=True, exist_ok=True)
        pid = rank.pid + 10_000 * number + 11
        text, table = _pass(rank, number, pid)
        for name, content in (("counter_collection", text), ("agent_info", _agents(rank.config))):
            path = folder / f"r{rank.rank}_{pid}_{name}.csv"
            path.write_text(content, encoding="utf-8")
            files.append(path.relative_to(directory).as_posix())
        dispatches.append(table)
    return files, pd.concat(dispatches, ignore_index=True)


def _possible(config: Config) -> bool:
    return config.gpu.dialect == "rocm" and config.plan.is_default


def _pass(rank: Rank, number: int, pid: int) -> tuple[str, pd.DataFrame]:
    config = rank.config
    rng = np.random.default_rng([config.seed, 100 + number, rank.rank])
    rows = _order(_dispatches(rank, number), config.faults.reorder, rng)
    kept = rng.random(len(rows)) >= config.faults.drop
    names = {name: k for k, name in enumerate(dict.fromkeys(item.kernel.name for _, item, _ in rows), start=12)}
    start = boot_ns(number * PASS_APART_NS + rank.rank * 1_234_560) // TIMESTAMP_NS * TIMESTAMP_NS
    out = io.StringIO()
    columns = _columns(config.counter_columns)
    out.write(",".join(f'"{c}"' for c in columns) + "\n")
    line = _line_format(columns)
    truth = []
    for dispatch, (step, item, correlation) in enumerate(rows, start=1):
        alone = _cycles(item, config, rng)
        # What starting and stopping the counters takes is in GRBM_GUI_ACTIVE, not between the timestamps.
        cycles = alone + (0 if item.collective else config.counter_overhead_cycles)
        length = max(1, round(alone / (config.gpu.max_clock_mhz * 1e-3 * COUNTER_CLOCK) / TIMESTAMP_NS)) * TIMESTAMP_NS
        if kept[dispatch - 1]:
            truth.append((rank.rank, number, dispatch, step, correlation))
            fields = _fields(rank, item, dispatch, pid, names[item.kernel.name], start, start + length)
            for counter in COUNTERS[number - 1]:
                value = _number(_VALUES[counter](item, config.gpu, cycles), config)
                out.write(line % (fields | {"Counter_Name": counter, "Counter_Value": value}))
        start += length + DISPATCH_NS
    return out.getvalue(), pd.DataFrame(truth, columns=list(_DISPATCH))


def _dispatches(rank: Rank, number: int) -> list[tuple[int, Item, int]]:
    """(step, item, correlation in the training's trace) in launch order: the last steps, after surplus warm-up."""
    steps = rank.steps[-rank.config.counter_steps:]
    warm = [item for item in rank.warm.program.items if item.kernel.kind != "memcpy"][-SURPLUS * number:]
    return [
        *((rank.warm.number, item, -1) for item in warm),
        *((step.number, item, step.correlation + item.correlation)
          for step in steps for item in step.program.items if item.kernel.kind != "memcpy"),
    ]


def _order(rows: list[tuple[int, Item, int]], share: float, rng: np.random.Generator) -> list[tuple[int, Item, int]]:
    """Neighbours of different streams swapped, with this probability."""
    rows = list(rows)
    for i in np.flatnonzero(rng.random(max(0, len(rows) - 1)) < share).tolist():
        if rows[i][1].stream != rows[i + 1][1].stream:
            rows[i], rows[i + 1] = rows[i + 1], rows[i]
    return rows


def _cycles(item: Item, config: Config, rng: np.random.Generator) -> float:
    """Cycles per die of a dispatch that runs alone; a collective of serialized ranks transfers without waiting."""
    if item.collective is not None:
        transfer = physics.transfer_ns(item.collective.name, item.collective.n_bytes, config)
        return transfer * config.gpu.max_clock_mhz * 1e-3 * COUNTER_CLOCK
    noise = 1.0 + config.faults.jitter * float(rng.standard_normal())
    return physics.cycles(item.kernel, config.gpu) * noise


_VALUES: dict[str, Callable[[Item, Gpu, float], float]] = {
    "GRBM_GUI_ACTIVE": lambda item, gpu, cycles: round(cycles * gpu.compute_dies),
    "SQ_WAVES": lambda item, gpu, cycles: item.kernel.blocks * -(-item.kernel.block // WAVE),
    "SQ_BUSY_CU_CYCLES": lambda item, gpu, cycles: round(cycles * min(gpu.units, item.kernel.blocks) / 4),
    "SQ_VALU_MFMA_BUSY_CYCLES": lambda item, gpu, cycles: round(item.kernel.flop_performed / FLOP_PER_BUSY_CYCLE),
    "SQ_INSTS_VALU_MFMA_MOPS_BF16": lambda item, gpu, cycles: round(item.kernel.flop_performed / FLOP_PER_MOP),
    "TCC_HIT_sum": lambda item, gpu, cycles: round(_lines(item, gpu) * (0.8 if item.kernel.flop else 0.3)),
    "TCC_MISS_sum": lambda item, gpu, cycles: round(_lines(item, gpu) * (0.2 if item.kernel.flop else 0.7)),
}
"""Sum over all instances of a counter for one dispatch, by the cycles per die."""


def _lines(item: Item, gpu: Gpu) -> float:
    """Cache lines asked for: matrix kernels load every operand tile, about one byte per 64 FLOPs."""
    return (item.kernel.bytes or item.kernel.flop_performed / 64) / LINE_BYTES


def _fields(rank: Rank, item: Item, dispatch: int, pid: int, kernel_id: int, start: int, end: int) -> dict[str, object]:
    config, kernel = rank.config, item.kernel
    agent = CPU_NODES + rank.local_rank
    vector = kernel.kind == "vector"
    name = kernel.name.replace("> >", ">>") if config.counter_columns == "7.0" else kernel.name  # another demangler
    return {
        "Correlation_Id": 0 if config.counter_columns == "6.2" else dispatch, "Dispatch_Id": dispatch,
        "Agent_Id": f'"Agent {agent}"' if config.counter_columns == "7.0" else agent,
        "Queue_Id": 139_892_123_975_680 + 4096 * item.stream if config.counter_columns == "6.2" else 1 + item.stream,
        "Process_Id": pid, "Thread_Id": pid, "Grid_Size": kernel.blocks * kernel.block, "Kernel_Id": kernel_id,
        "Kernel_Name": name, "Workgroup_Size": kernel.block, "LDS_Block_Size": 0 if vector else 65_536,
        "Scratch_Size": 0, "VGPR_Count": 32 if vector else 128, "Accum_VGPR_Count": 0 if vector else 128,
        "SGPR_Count": 32 if vector else 112,
        "Start_Timestamp": start, "End_Timestamp": end,
    }


def _columns(version: str) -> tuple[str, ...]:
    return tuple(c for c in _COLUMNS if version != "6.2" or c not in _NOT_IN_6_2)


def _line_format(columns: tuple[str, ...]) -> str:
    quoted = {"Kernel_Name", "Counter_Name"}
    return ",".join(f'"%({c})s"' if c in quoted else f"%({c})s" for c in columns) + "\n"


def _number(value: float, config: Config) -> str:
    return str(int(value)) if config.counter_columns == "6.2" else f"{value:.6f}"


def _agents(config: Config) -> str:
    """The host's agents: CPU sockets, then GPUs."""
    gpu = config.gpu
    cores = config.host.physical_cores // CPU_NODES * config.host.siblings
    rows = [{"Agent_Type": "CPU", "Cpu_Cores_Count": cores, "Cu_Count": cores, "Cpu_Core_Id_Base": node * cores,
             "Num_Xcc": 1, "Max_Engine_Clk_Ccompute": 3700,
             "Name": "AMD EPYC 9684X 96-Core Processor", "Vendor_Name": "CPU",
             "Product_Name": "AMD EPYC 9684X 96-Core Processor"} for node in range(CPU_NODES)]
    for local in range(config.gpus_per_host):
        bus = int(pci_address(local).split(":")[1], 16)
        rows.append({
            "Agent_Type": "GPU", "Simd_Count": gpu.units * 4, "Max_Waves_Per_Simd": 8, "Lds_Size_In_Kb": 64,
            "Num_Gws": 64, "Wave_Front_Size": WAVE, "Num_Xcc": gpu.compute_dies, "Cu_Count": gpu.units,
            "Array_Count": 32,
            "Num_Shader_Banks": 32, "Simd_Arrays_Per_Engine": 1, "Cu_Per_Simd_Array": 10, "Simd_Per_Cu": 4,
            "Max_Slots_Scratch_Cu": 32, "Gfx_Target_Version": 90402, "Vendor_Id": 4098, "Device_Id": 29857,
            "Location_Id": bus << 8, "Drm_Render_Minor": 128 + 8 * local, "Max_Engine_Clk_Ccompute": 3700,
            "Max_Engine_Clk_Fcompute": gpu.max_clock_mhz, "Max_Waves_Per_Cu": 32, "Workgroup_Max_Size": 1024,
            "Gpu_Id": 17_000 + 4_096 * local, "Name": gpu.arch, "Vendor_Name": "AMD", "Product_Name": gpu.name,
            "Model_Name": "ip discovery"})
    out = io.StringIO()
    writer = csv.DictWriter(out, _AGENT_COLUMNS, restval=0, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writeheader()
    for node, row in enumerate(rows):
        writer.writerow({"Node_Id": node, "Logical_Node_Id": node, "Model_Name": "", **row})
    return out.getvalue()


_AGENT_COLUMNS = (
    "Node_Id", "Logical_Node_Id", "Agent_Type", "Cpu_Cores_Count", "Simd_Count", "Cpu_Core_Id_Base", "Simd_Id_Base",
    "Max_Waves_Per_Simd", "Lds_Size_In_Kb", "Gds_Size_In_Kb", "Num_Gws", "Wave_Front_Size", "Num_Xcc", "Cu_Count",
    "Array_Count", "Num_Shader_Banks", "Simd_Arrays_Per_Engine", "Cu_Per_Simd_Array", "Simd_Per_Cu",
    "Max_Slots_Scratch_Cu", "Gfx_Target_Version", "Vendor_Id", "Device_Id", "Location_Id", "Domain", "Drm_Render_Minor",
    "Num_Sdma_Engines", "Num_Sdma_Xgmi_Engines", "Num_Sdma_Queues_Per_Engine", "Num_Cp_Queues",
    "Max_Engine_Clk_Ccompute", "Max_Engine_Clk_Fcompute", "Sdma_Fw_Version", "Fw_Version", "Capability",
    "Cu_Per_Engine", "Max_Waves_Per_Cu",
    "Family_Id", "Workgroup_Max_Size", "Grid_Max_Size", "Local_Mem_Size", "Hive_Id", "Gpu_Id", "Workgroup_Max_Dim_X",
    "Workgroup_Max_Dim_Y", "Workgroup_Max_Dim_Z", "Grid_Max_Dim_X", "Grid_Max_Dim_Y", "Grid_Max_Dim_Z", "Name",
    "Vendor_Name", "Product_Name", "Model_Name",
)
