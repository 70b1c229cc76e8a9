"""The host's CPUs from Linux' /proc and /sys: busy time, clock, and where the training's threads run.

/proc/stat counts in ticks of 10 ms, so a CPU that is busy for less than that may show as idle, and a sample over
200 ms is exact to 5 %. A value needs two readings: the first one gives none.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from torch_ext.sources import Sample, Unavailable
from torch_ext.telemetry_format import pairs

Ticks = dict[int, tuple[int, int]]
"""busy and all ticks since boot, by logical CPU"""


class Cpu:
    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys/devices/system/cpu")) -> None:
        self._proc, self._sys = proc, sys
        try:
            self._stat = os.open(proc / "stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"cpu: {proc / 'stat'}: {error.strerror}") from error
        self._ticks = self._read_ticks()
        self._thread_ticks: dict[tuple[int, str], int] = {}

    def cores(self) -> Sample:
        """cpu_cores: the physical cores numbered from 0 in the order of their first logical CPU."""
        siblings = {cpu: _text(self._sys / f"cpu{cpu}/topology/thread_siblings_list") for cpu in sorted(self._ticks)}
        order: dict[str, int] = {}
        return {"cpu_cores": pairs(
            (cpu, order.setdefault(group or f"alone {cpu}", len(order))) for cpu, group in siblings.items())}

    def read(self) -> dict[int, float]:
        """Percent busy since the previous call of the CPUs that were busy at all."""
        before, self._ticks = self._ticks, self._read_ticks()
        return busy_percent(before, self._ticks)

    def clocks(self, cpus: Iterable[int]) -> str | None:
        """MHz of some CPUs as text, None where the host does not tell."""
        found = ((cpu, _text(self._sys / f"cpu{cpu}/cpufreq/scaling_cur_freq")) for cpu in cpus)
        return pairs((cpu, int(khz) // 1000) for cpu, khz in found if khz.isdecimal()) or None

    def threads(self, pids: Iterable[int]) -> str | None:
        """The number of these processes' threads that ran since the previous call, by the CPU they ran on last."""
        before, self._thread_ticks = self._thread_ticks, {}
        by_cpu: Counter[int] = Counter()
        for pid in pids:
            for thread, (ticks, cpu) in self._threads_of(pid):
                self._thread_ticks[pid, thread] = ticks
                by_cpu[cpu] += ticks > before.get((pid, thread), ticks)
        return pairs(sorted((cpu, n) for cpu, n in by_cpu.items() if n)) or None

    def close(self) -> None:
        os.close(self._stat)

    def _read_ticks(self) -> Ticks:
        return parse_stat(_read_all(self._stat))

    def _threads_of(self, pid: int) -> list[tuple[str, tuple[int, int]]]:
        try:
            tasks = os.listdir(self._proc / str(pid) / "task")
        except OSError:
            return []
        parsed = ((task, thread_state(_text(self._proc / str(pid) / "task" / task / "stat"))) for task in tasks)
        return [(task, state) for task, state in parsed if state is not None]


def parse_stat(content: bytes) -> Ticks:
    """The per-CPU lines of /proc/stat. Busy: user, nice, system, irq, softirq, steal (guest time is in user)."""
    ticks: Ticks = {}
    for row in content.splitlines():
        if not row.startswith(b"cpu"):
            break
        name, *fields = row.split()
        if name != b"cpu":
            user, nice, system, idle, iowait, irq, softirq, steal = map(int, fields[:8])
            busy = user + nice + system + irq + softirq + steal
            ticks[int(name[3:])] = busy, busy + idle + iowait
    return ticks


def busy_percent(before: Ticks, after: Ticks) -> dict[int, float]:
    """Percent of the ticks between two readings, CPUs above 0 only. Counters that fall back count as no time."""
    found = {}
    for cpu, (busy, total) in after.items():
        was_busy, was_total = before.get(cpu, (busy, total))
        if busy > was_busy and total > was_total:
            found[cpu] = min(100.0, round(100 * (busy - was_busy) / (total - was_total), 1))
    return found


def thread_state(stat: str) -> tuple[int, int] | None:
    """CPU ticks used and last CPU of a /proc/PID/task/TID/stat line; the name in it may hold anything."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12]), int(fields[36])) if len(fields) > 36 else None


def _read_all(descriptor: int) -> bytes:
    """/proc/stat may come in pieces; the file must be read from its start to be made anew."""
    content = b""
    while piece := os.pread(descriptor, 1 << 20, len(content)):
        content += piece
    return content


def _text(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
