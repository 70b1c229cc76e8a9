"""The sampler: a process of its own that reads clocks, power, temperatures and CPUs into `<host>.telemetry.csv`.

    tb-chopper sample --out DIR [--hz 20] [--seconds 60]        by hand
    python -m torch_ext.sampler --out DIR                       the same
    with torch_ext.telemetry(DIR): ...                          from the training

It never reads the environment or command lines of other processes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch_ext import owners, telemetry_format, topology
from torch_ext.sources import Gpu, GpuSource, Sample, Unavailable, open_gpu_sources
from torch_ext.sources.cpu import Cpu
from torch_ext.telemetry_format import line
from torch_ext.telemetry_log import Log

DEFAULT_HZ = 20.0
MAX_HZ = 100.0
CPU_HZ = 5.0
"""more often than that, /proc/stat's ticks of 10 ms are too coarse"""
HOUSEKEEPING_NS = 500_000_000
SLOW_NS = 1_000_000_000
"""clocks of the host, limits, CPU frequencies and threads: about once per second"""
CPU_BUDGET = 0.02
"""share of one core that the sampler may take at the default rate"""
MIN_HZ = 1.0
_S = 1_000_000_000


class Sampler:
    """Reads every source in turn and writes what it finds, until `keep_going` says no."""

    def __init__(self, log: Log, sources: Sequence[GpuSource], cpu: Cpu | None, hz: float, host: str) -> None:
        self._log, self._sources, self._cpu = log, sources, cpu
        self._gpus = [(source, i) for source in sources for i in range(len(source.gpus))]
        self._limits: list[Sample] = [{} for _ in self._gpus]
        self._failures = [0] * len(self._gpus)
        self.period_ns = round(_S / hz)
        now = time.monotonic_ns()
        log.add(line("start", now, now, text=host))
        for gpu, (source, i) in enumerate(self._gpus):
            described: Gpu = source.gpus[i]
            log.add(line("gpu_info", now, now, gpu=gpu, pci_address=described.pci_address, source=source.name,
                         text=described.name))
        if cpu is not None:
            log.add(line("cpu_info", now, now, **cpu.cores()))

    def note(self, text: str) -> None:
        now = time.monotonic_ns()
        self._log.add(line("note", now, now, text=text))

    def run(self, pids: Callable[[], list[int]], keep_going: Callable[[], str | None], budget: float | None) -> None:
        """Sample until `keep_going` returns a reason to stop. `pids`: the processes whose threads are counted.
        `budget`: share of one core; the rate is lowered, with a note, where sampling would take more."""
        reason = None
        next_ns = time.monotonic_ns()
        next_cpu_ns = next_ns + round(_S / CPU_HZ)  # before, no tick of /proc/stat has passed: all would seem idle
        kept_ns = slow_ns = 0
        spent = _Spending(budget)
        threads = _Thrift(SLOW_NS, 0.25 * CPU_BUDGET)
        while reason is None:
            now = time.monotonic_ns()
            if now - slow_ns >= SLOW_NS:
                slow_ns = now
                self._write_clocks()
                self._read_limits()
            self._sample_gpus()
            if self._cpu is not None and now >= next_cpu_ns:
                next_cpu_ns = now + max(self.period_ns, round(_S / CPU_HZ))
                self._sample_cpu(pids() if threads.due() else None)
                threads.done()
            now = time.monotonic_ns()
            if now - kept_ns >= HOUSEKEEPING_NS:
                kept_ns = now
                reason = keep_going()
                if (slower := spent.longer_period(self.period_ns)) is not None:
                    self.period_ns = slower
                    self.note(f"rate lowered to {_S / slower:.1f} Hz: sampling took more than {budget:.0%} of a core")
            self._log.flush(now)
            # No burst after a hold-up: the samples that were due are missed, and the times tell.
            next_ns = max(next_ns + self.period_ns, now)
            time.sleep(max(0, next_ns - time.monotonic_ns()) / _S)
        now = time.monotonic_ns()
        self._write_clocks()
        self._log.add(line("stop", now, now, text=reason))

    def _sample_gpus(self) -> None:
        for gpu, (source, i) in enumerate(self._gpus):
            before = time.monotonic_ns()
            try:
                sample = source.read(i)
            except Exception as error:
                self._failures[gpu] += 1
                if self._failures[gpu] == 1:
                    self.note(f"gpu {gpu} gives no values: {error}")
                continue
            after = time.monotonic_ns()
            self._failures[gpu] = 0
            limits, self._limits[gpu] = self._limits[gpu], {}
            self._log.add(line("gpu", before, after, gpu=gpu, **{**sample, **limits}))

    def _sample_cpu(self, pids: list[int] | None) -> None:
        assert self._cpu is not None
        before = time.monotonic_ns()
        busy = self._cpu.read()
        after = time.monotonic_ns()
        more: Sample = {}
        if pids is not None:
            more = {"cpu_mhz": self._cpu.clocks(busy), "cpu_threads": self._cpu.threads(pids)}
        self._log.add(line("cpu", before, after, cpu_pct=telemetry_format.pairs(busy.items()), **more))

    def _read_limits(self) -> None:
        for gpu, (source, i) in enumerate(self._gpus):
            # A GPU that fails is told of by its samples.
            with contextlib.suppress(Exception):
                self._limits[gpu] = source.limits(i)

    def _write_clocks(self) -> None:
        before, realtime, boottime, after = min((_read_clocks() for _ in range(3)), key=lambda c: c[3] - c[0])
        self._log.add(line("clock", before, after, realtime_ns=realtime, boottime_ns=boottime))


class _Spending:
    """Keeps the sampler's own CPU time below its budget."""

    WINDOW_S = 5.0

    def __init__(self, budget: float | None) -> None:
        self._budget = budget
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def longer_period(self, period_ns: int) -> int | None:
        """A period that fits the budget, where the present one did not over the last seconds."""
        wall, cpu = time.monotonic() - self._wall, time.process_time() - self._cpu
        if self._budget is None or wall < self.WINDOW_S:
            return None
        self._wall, self._cpu = time.monotonic(), time.process_time()
        share = cpu / wall
        longest = round(_S / MIN_HZ)
        if share <= self._budget or period_ns >= longest:
            return None
        return min(longest, round(period_ns * share / self._budget * 1.1))


class _Thrift:
    """Repeats a job at most once per interval, and more rarely where its cost would exceed a share of one core."""

    def __init__(self, interval_ns: int, share: float) -> None:
        self._interval_ns, self._share = interval_ns, share
        self._started_ns = 0
        self._running = False
        self._cpu = 0.0

    def due(self) -> bool:
        now = time.monotonic_ns()
        self._running = now - self._started_ns >= self._interval_ns
        if self._running:
            self._started_ns, self._cpu = now, time.process_time()
        return self._running

    def done(self) -> None:
        if self._running:
            cost_ns = (time.process_time() - self._cpu) * _S
            self._interval_ns = max(SLOW_NS, round(cost_ns / self._share))


def _read_clocks() -> tuple[int, int, int | None, int]:
    before = time.monotonic_ns()
    realtime = time.time_ns()
    boottime = time.clock_gettime_ns(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else None
    return before, realtime, boottime, time.monotonic_ns()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tb-chopper sample`."""
    parser.add_argument("--out", required=True, metavar="DIR", help="log directory of the run; <host>.telemetry.csv is "
                        "written there, and appended to where it exists")
    parser.add_argument("--hz", type=_rate, default=None, metavar="N",
                        help=f"samples per second, up to {MAX_HZ:g} (default: {DEFAULT_HZ:g}, or fewer where that "
                             f"would take more than {CPU_BUDGET * 100:.0f} %% of a core)")
    parser.add_argument("--seconds", type=float, default=None, metavar="N", help="stop by itself after this time")
    parser.add_argument("--pid", type=int, action="append", default=[], metavar="PID",
                        help="count this process's threads by core and stop when it has ended; may be repeated")
    parser.add_argument("--owners", type=int, default=None, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Sample until told to stop. Returns 0, or 2 with one line on stderr where it cannot begin or breaks off."""
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = args.owners if args.owners is not None else owners.open_file(out)
        if args.owners is None and not owners.lock(file):
            return _fail(f"{out}: a sampler for this folder already runs on this host")
        for pid in args.pid:
            owners.add(file, pid)
        _use_all_cpus()
        stopped: list[str] = []
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda number, frame: stopped.append(signal.Signals(number).name))
        gc.disable()
        watched = args.owners is not None or bool(args.pid)
        deadline = None if args.seconds is None else time.monotonic() + args.seconds

        def keep_going() -> str | None:
            if stopped:
                return stopped[0]
            if deadline is not None and time.monotonic() >= deadline:
                return "time is up"
            return "the training has ended" if watched and not owners.living(file) else None

        while True:
            _sample(out, args.hz, lambda: owners.living(file), keep_going)
            # Who asked after the last look, and found the lock taken, relies on this sampler.
            owners.unlock(file)
            if not watched or keep_going() or not owners.lock(file):
                return 0
    except OSError as error:
        return _fail(f"{error.filename or out}: {error.strerror or error}")


def _sample(out: Path, hz: float | None, pids: Callable[[], list[int]], keep_going: Callable[[], str | None]) -> None:
    host = socket.gethostname()
    log = Log(out / telemetry_format.file_name(host))
    sources, missing = open_gpu_sources()
    cpu = _open_cpu(missing)
    sampler = Sampler(log, sources, cpu, hz or DEFAULT_HZ, host)
    if not sources:
        sampler.note(f"no GPU is sampled ({'; '.join(missing)})")
    topology.record(out, host, sampler.note)
    try:
        sampler.run(pids, keep_going, CPU_BUDGET if hz is None else None)
    finally:
        log.close()
        for source in sources:
            source.close()


def _open_cpu(missing: list[str]) -> Cpu | None:
    try:
        return Cpu()
    except Unavailable as error:
        missing.append(str(error))
        return None


def _use_all_cpus() -> None:
    """Leave the core that the training was pinned to, and let it go first."""
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        os.nice(5)
    except (OSError, AttributeError):
        pass


def _rate(text: str) -> float:
    hz = float(text)
    if not 0 < hz <= MAX_HZ:
        raise argparse.ArgumentTypeError(f"between 0 and {MAX_HZ:g}, not {text}")
    return hz


def _fail(message: str) -> int:
    print(f"tb-chopper sample: {message}", file=sys.stderr)
    return 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="tb-chopper sample", description="Write clocks, power and CPU use to a log.")
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
