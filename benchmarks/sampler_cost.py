"""What the telemetry sampler costs: `python benchmarks/sampler_cost.py [--seconds 20] [--gpus 8] [--call-us 300]`.

Three parts:
  1. CPU time of a sampler process at the default rate, on this host as it is (its own GPUs and CPUs).
  2. The same with stand-ins for `--gpus` AMD GPUs whose library call takes `--call-us` of CPU time each, and the CPU
     source on a host of `--cpus` logical CPUs: what a big node would see.
  3. Step time of a small model on one thread with and without a sampler beside it, in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch_ext import sampler
from torch_ext.sources import Gpu, Sample, amd
from torch_ext.sources.cpu import Cpu
from torch_ext.telemetry_log import Log

METRICS = {
    "temperature_hotspot": 63, "temperature_mem": 51, "temperature_hbm": ["N/A"] * 4, "average_gfx_activity": 98,
    "average_umc_activity": 41, "average_socket_power": "N/A", "current_socket_power": 747,
    "energy_accumulator": 10_000_000_000, "current_gfxclk": "N/A", "current_gfxclks": [1900] * 8, "current_uclk": 1300,
    "accumulation_counter": 1000, "prochot_residency_acc": 0, "ppt_residency_acc": 300, "socket_thm_residency_acc": 7,
    "vr_thm_residency_acc": 0, "hbm_thm_residency_acc": 0,
}


class StandIn:
    """GPUs whose library call takes a given CPU time."""

    name = "stand-in"

    def __init__(self, gpus: int, call_us: float) -> None:
        self.gpus = [Gpu("stand-in", f"0000:{i:02x}:00.0") for i in range(gpus)]
        self._call_ns = round(call_us * 1000)
        self._calls = 0

    def read(self, i: int) -> Sample:
        end = time.perf_counter_ns() + self._call_ns
        while time.perf_counter_ns() < end:
            pass
        self._calls += 1
        before, now = {**METRICS}, {**METRICS, "accumulation_counter": 1000 + self._calls}
        return {**amd.values(now, 15.3e-6), "throttle": amd.reasons(now, amd.residencies(before), amd.residencies(now))}

    def limits(self, i: int) -> Sample:
        return {"clock_limit_mhz": 2100, "power_limit_w": 750}

    def close(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--call-us", type=float, default=300)
    parser.add_argument("--cpus", type=int, default=384)
    args = parser.parse_args()
    print(f"this host:  {of_this_host(args.seconds):6.2%} of a core")
    share, hz = of_a_big_node(args.seconds, args.gpus, args.call_us, args.cpus)
    print(f"big node:   {share:6.2%} of a core at {hz:.1f} Hz ({args.gpus} GPUs, {args.call_us:g} µs per call, "
          f"{args.cpus} CPUs)")
    share, hz = of_a_big_node(args.seconds, args.gpus, 0, args.cpus)
    print(f"  of which ours: {share:6.2%} at {hz:.1f} Hz")
    on_the_step(args.seconds)


def of_this_host(seconds: float) -> float:
    """CPU time of a sampler process over wall time, its start left out."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen([sys.executable, "-m", "torch_ext.sampler", "--out", folder])
        time.sleep(2)
        before, began = cpu_seconds(process.pid), time.monotonic()
        time.sleep(seconds)
        share = (cpu_seconds(process.pid) - before) / (time.monotonic() - began)
        process.terminate()
        process.wait()
    return share


def of_a_big_node(seconds: float, gpus: int, call_us: float, cpus: int) -> tuple[float, float]:
    """CPU share of a sampler in this process, with the default budget, and the rate it ended at."""
    with tempfile.TemporaryDirectory() as folder:
        stat = Path(folder) / "stat"
        stat.write_text("cpu  0 0 0 0\n" + "".join(f"cpu{i} {i} 0 12345 99999999 12 0 34 0 0 0\n" for i in range(cpus)))
        running = sampler.Sampler(Log(Path(folder) / "log.csv"), [StandIn(gpus, call_us)] if gpus else [],
                                  Cpu(proc=Path(folder)), sampler.DEFAULT_HZ, "host")
        # The budget acts over the first seconds; what counts is the rate it leads to.
        settled = time.monotonic() + 12
        began: list[float] = []

        def keep_going() -> str | None:
            now = time.monotonic()
            if not began and now >= settled:
                began.extend((now, time.process_time()))
            return "enough" if began and now - began[0] >= seconds else None

        running.run(lambda: [os.getpid()], keep_going, sampler.CPU_BUDGET)
        return (time.process_time() - began[1]) / (time.monotonic() - began[0]), 1e9 / running.period_ns


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def on_the_step(seconds: float) -> None:
    """Median step time without and with a sampler, in turns, so that drift hits both alike."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    batch = torch.randn(128, 512)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(6):
        with tempfile.TemporaryDirectory() as folder:
            beside = None
            if turn % 2:
                beside = subprocess.Popen([sys.executable, "-m", "torch_ext.sampler", "--out", folder])
                time.sleep(1)
            end = time.monotonic() + seconds / 6
            while time.monotonic() < end:
                began = time.perf_counter()
                model(batch).sum().backward()
                times[bool(turn % 2)].append((time.perf_counter() - began) * 1e3)
            if beside is not None:
                beside.terminate()
                beside.wait()
    without, with_it = (statistics.median(times[k]) for k in (False, True))
    spread = statistics.quantiles(times[False], n=4)
    print(f"step time:  {without:.3f} ms without, {with_it:.3f} ms with ({with_it / without - 1:+.2%}; quartiles "
          f"without: {spread[0]:.3f} to {spread[2]:.3f} ms)")


if __name__ == "__main__":
    main()
