"""Comma-separated logs of command-line tools: `amd-smi metric --csv`, `rocm-smi --csv` in a loop, `nvidia-smi
--query-gpu --format=csv -l`, and tables exported from the paper's own tool (one column per gpu_metrics field).

They differ in the names of their columns (smi_columns) and in how they are damaged (text_table): preambles, repeated
headers, lists with commas in a field, rows shorter than the header, a cut last line.
"""

from __future__ import annotations

from tb_chopper.backend.findings import Finding
from tb_chopper.backend.readers import smi_columns, text_table
from tb_chopper.backend.readers.log_times import TimeBase
from tb_chopper.backend.readers.smi_columns import Interpreted


def recognises(head: str) -> bool:
    return any(smi_columns.is_header(text_table.split(line)) for line in head.splitlines())


def read(content: bytes, file: str, base: TimeBase) -> Interpreted:
    """Raises UnreadableFile, in one line, where nothing can be used or its times mean nothing."""
    table = text_table.comma_separated(content, file, smi_columns.is_header)
    read = smi_columns.interpret(table.rows, _source(list(table.rows.columns)), base, file)
    if table.cut:
        read.findings.append(Finding("telemetry_cut", "info", f"{file}: an incomplete last line was left out"))
    return read


def _source(headers: list[str]) -> str:
    """The tool, by the names that only it uses."""
    names = {smi_columns.plain(h) for h in headers}
    if any("." in n for n in names):
        return "nvidia-smi"
    if names & {"socket_power", "gfx_0_clk", "umc_activity"}:
        return "amd-smi"
    if names & {"current_gfxclk", "current_gfxclks", "current_socket_power"}:
        return "gpu_metrics"
    return "rocm-smi" if "device" in names else "csv"
