"""Damage of a trace file in words: findings for what was repaired or lost, one line for a file of no use."""

from __future__ import annotations

from collections import Counter

import msgspec

from tb_chopper.backend.errors import ChopperError
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.readers.byte_stream import Decompressed, open_binary
from tb_chopper.backend.readers.salvage import Damage, merged

REPAIRED = {
    "bad_utf8": "names with bytes that are no UTF-8; they show as \ufffd",
    "control_characters": "names with bare control characters",
    "escaped_backslash": "names with single backslashes (Windows paths); they are taken as they stand",
    "unescaped_quotes": "names with unescaped quotes",
    "non_finite_number": "numbers that are infinite or NaN; they count as missing",
}
COUNTED: dict[str, tuple[str, str]] = {
    "missing_timestamp": ("warning", "events have no time and are left out"),
    "missing_duration": ("warning", "events have no duration and add no time"),
    "negative_duration": ("warning", "events end before they start and add no time"),
    "kernel_without_time": ("warning", "kernels without time (start and duration 0) are left out of every number"),
}


def describe(damage: list[Damage], name: str, size: int, counts: Counter[str], cut: str) -> list[Finding]:
    """Findings for everything that was found while reading. Errors: events were lost."""
    findings = [_one(same, name, size, counts, cut) for same in merged(damage)]
    for code, (severity, words) in COUNTED.items():
        if counts[code]:
            findings.append(Finding(code, severity, f"{counts[code]} {words}", counts[code]))  # type: ignore[arg-type]
    if counts["python_frames"]:
        findings.append(Finding(
            "python_frames_dropped", "info",
            f"{counts['python_frames']} frames of the Python tracer are left out; nn.Module frames are kept",
            counts["python_frames"]))
    return findings


def _one(d: Damage, name: str, size: int, counts: Counter[str], cut: str) -> Finding:
    short = name.rsplit("/", 1)[-1]
    if d.code == "truncated":
        why = f" ({cut})" if cut else ""
        return Finding(d.code, "error", (
            f"{short} ({size} bytes) is truncated{why}: its text stops at byte {d.offset}; the {counts['events']} "
            "whole events before it are used. Was the job killed while writing? Export it again"), d.n)
    if d.code == "syntax_error":
        line, column = _line_and_column(name, d.offset)
        return Finding(d.code, "error", (
            f"{short}, line {line} column {column} (byte {d.offset}): {d.detail}; {d.n} place(s) of this kind are "
            f"left out, the {counts['events']} whole events are used"), d.n)
    if d.code == "trailing_garbage":
        return Finding(d.code, "warning", f"{short}: what follows the end of the trace (byte {d.offset}) is ignored")
    if d.code == "gzip_tail":
        return Finding(d.code, "warning", f"{short}: {d.detail}; the trace before it is whole", d.n)
    if d.code == "damaged_metadata":
        return Finding(d.code, "warning", f"{short}: metadata before the events is malformed; what is legible is used")
    if d.code == "ignored_entries":
        return Finding(d.code, "info", f"{d.n} entries that are no events (null and the like) are ignored", d.n)
    return Finding(d.code, "warning", f"{short}: {d.n} {REPAIRED[d.code]} (first near byte {d.offset})", d.n)


def _line_and_column(name: str, offset: int) -> tuple[int, int]:
    """Line and column (from 1) of a byte of the decompressed text. Reads the file again: only for damaged ones."""
    line, line_start, position = 1, 0, 0
    try:
        with open_binary(name) as file:
            for block in Decompressed(file):
                block = block[: offset - position]
                line += block.count(b"\n")
                if b"\n" in block:
                    line_start = position + block.rindex(b"\n") + 1
                position += len(block)
                if position >= offset:
                    break
    except ChopperError:
        return 0, 0
    return line, offset - line_start + 1


def no_events(text: bytes, cut: str) -> str:
    """Why a text without an array of events is no trace: what it is, and what to do."""
    if not text.strip(b"\0 \t\r\n\xef\xbb\xbf"):
        return (f"holds nothing ({cut}); export it again" if cut else
                "the file is empty; was the job killed before it wrote the trace?")
    if text.startswith(b"SQLite format 3"):
        return "this is an SQLite database (rocpd or Nsight Systems), not a Kineto trace"
    if b"\0" in text[:4096] or not _is_text(text[:4096]):
        return ("this is binary (a Perfetto .pftrace?), not JSON; export the trace as Chrome JSON "
                "(prof.export_chrome_trace)")
    try:
        keys = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        is_object = text.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
        return ("is truncated before its first event; export it again" if is_object
                else "this is no JSON; a trace of torch.profiler is expected")
    if isinstance(keys, dict) and "nodes" in keys:
        return ("this is an execution graph (Chakra, ExecutionTraceObserver), not a timeline; open the Kineto trace of "
                "the same run instead")
    return "this is JSON without traceEvents, not a trace of torch.profiler"


def _is_text(text: bytes) -> bool:
    odd = sum(byte < 32 and byte not in b"\t\r\n\f" for byte in text)
    return odd <= len(text) // 100


def nothing_left(damage: list[Damage], counts: Counter[str], cut: str) -> str:
    """Why a file with an array of events has nothing to show."""
    codes = {d.code for d in damage}
    if "truncated" in codes or cut:
        return "is truncated before its first whole event; export it again"
    if "syntax_error" in codes:
        return "no event of it can be read: malformed JSON; export it again"
    if not counts["events"]:
        return "the trace holds no events; was the profiler active (schedule, step) when it was exported?"
    return (f"the {counts['events']} entries of traceEvents hold no operator and no kernel of torch.profiler; was the "
            "profiler active when it was exported?")
