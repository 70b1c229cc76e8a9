"""A telemetry log of any known format, told apart by its content."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.readers import cpu_csv, dmon, smi_csv, telemetry
from tb_chopper.backend.readers.log_times import TimeBase
from tb_chopper.backend.readers.smi_columns import Interpreted
from tb_chopper.backend.schema import TelemetryLog

HEAD_BYTES = 16_384
PRIVATE = {".pkl", ".pickle"}


def read(path: str | os.PathLike[str], base: TimeBase | None = None, host: str | None = None) -> TelemetryLog:
    """Our own log, or one of amd-smi, rocm-smi, nvidia-smi, dmon, or a table exported as CSV.

    base: what the user knows about the times of a foreign log. host: the host it was taken on, where the run has
    several. Raises UnreadableFile, in one line: what is wrong and what to do.
    """
    path, base = Path(path), base or TimeBase()
    head = _head(path)
    if head.startswith("record,before_ns,after_ns"):
        return telemetry.read(path)
    if path.suffix in PRIVATE:
        raise UnreadableFile(f"{path}: a pickle can run code and is not opened; export the table as CSV")
    if dmon.recognises(head):
        return _log(path, dmon.read(path, base), host)
    if cpu_csv.recognises(head):
        cpu, times, findings = cpu_csv.read(path, base)
        log = _empty(path, times)
        return replace(log, cpu=cpu, findings=[f.at(path.name) for f in findings])
    if smi_csv.recognises(head) or not head.strip():
        return _log(path, smi_csv.read(path, base), host)
    raise UnreadableFile(f"{path}: no telemetry log that is known: neither ours nor of amd-smi, rocm-smi, nvidia-smi")


def _head(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise UnreadableFile(f"{path}: cannot be read: {error.strerror or error}") from error
    return head.decode("utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", "replace")


def _log(path: Path, read: Interpreted, host: str | None) -> TelemetryLog:
    log = _empty(path, read.times)
    return replace(log, samples=schema.conform(read.samples.assign(host=host), schema.TELEMETRY),
                   gpus=schema.conform(read.gpus.assign(host=host), schema.TELEMETRY_GPUS),
                   findings=[f.at(path.name) for f in read.findings])


def _empty(path: Path, times: str) -> TelemetryLog:
    return TelemetryLog(path, schema.empty(schema.TELEMETRY), schema.empty(schema.TELEMETRY_GPUS),
                        schema.empty(schema.CPU), schema.empty(schema.CPU_CORES), schema.empty(schema.CLOCKS), times)
