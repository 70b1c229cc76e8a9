"""A telemetry log of any known format, told apart by its content."""

from __future__ import annotations

import os
from dataclasses import replace

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.readers import cpu_csv, dmon, smi_csv, telemetry, text_table
from tb_chopper.backend.readers.byte_stream import open_binary
from tb_chopper.backend.readers.log_times import TimeBase
from tb_chopper.backend.readers.smi_columns import Interpreted
from tb_chopper.backend.schema import TelemetryLog

HEAD_BYTES = 16_384
PRIVATE = (".pkl", ".pickle")


def read(path: str | os.PathLike[str], base: TimeBase | None = None, host: str | None = None,
         within: tuple[int, int] | None = None) -> TelemetryLog:
    """Our own log, or one of amd-smi, rocm-smi, nvidia-smi, dmon, or a table exported as CSV; a path or an fsspec URL.

    base: what the user knows about the times of a foreign log. host: the host it was taken on, where the run has
    several. within: ns since the epoch, to read less of a sampler's long log (a little more is read).
    Raises UnreadableFile, in one line: what is wrong and what to do.
    """
    where, base = os.fspath(path), base or TimeBase()
    name = where.replace(os.sep, "/").rsplit("/", 1)[-1]
    if name.endswith(PRIVATE):
        raise UnreadableFile(f"{where}: a pickle can run code and is not opened; export the table as CSV")
    with open_binary(where) as file:
        content = file.read()
    head = text_table.decoded(content[:HEAD_BYTES])
    if head.startswith("record,before_ns,after_ns"):
        return telemetry.read(content, name, within)
    if dmon.recognises(head):
        return _log(name, dmon.read(content, name, base), host)
    if cpu_csv.recognises(head):
        cpu, times, findings = cpu_csv.read(content, name, base)
        cpu = schema.conform(cpu.assign(host=host), schema.CPU)
        return replace(_empty(name, times), cpu=cpu, findings=[f.at(name) for f in findings])
    if smi_csv.recognises(head) or not head.strip():
        return _log(name, smi_csv.read(content, name, base), host)
    raise UnreadableFile(f"{where}: no telemetry log that is known: neither ours nor of amd-smi, rocm-smi, nvidia-smi")


def _log(name: str, read: Interpreted, host: str | None) -> TelemetryLog:
    log = _empty(name, read.times)
    return replace(log, samples=schema.conform(read.samples.assign(host=host), schema.TELEMETRY),
                   gpus=schema.conform(read.gpus.assign(host=host), schema.TELEMETRY_GPUS),
                   findings=[f.at(name) for f in read.findings])


def _empty(name: str, times: str) -> TelemetryLog:
    return TelemetryLog(name, schema.empty(schema.TELEMETRY), schema.empty(schema.TELEMETRY_GPUS),
                        schema.empty(schema.CPU), schema.empty(schema.CPU_CORES), schema.empty(schema.CLOCKS), times)
