"""Time and memory to open a trace, side by side: this project, `json.loads` with pandas, and HTA.

    python benchmarks/open_trace.py [--mb 10 100 1000] [--hta-python VENV/bin/python] [--ways NAME ...]

Each way runs in a process of its own on the same file (benchmarks/make_trace.py). The time is that of the work,
imports excluded; the memory is the highest sum over the process and all its children. HTA (PyPI name
`traceinsight`, needs pandas < 3) runs in a virtual environment of its own and is left out where there is none.
Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from tb_chopper.backend.readers.decoders import processors

HERE = Path(__file__).resolve().parent
OPEN = """
import tb_chopper, tb_chopper.backend.run
def work(path):
    run = tb_chopper.open_run(path)
    run.timeline(by="step"), run.overlap(by="operation"), run.launch_overhead(by="operation"), run.kernels
"""
WORK = {
    "reader": """
from tb_chopper.backend.readers import kineto
def work(path):
    kineto.read(path)
""",
    "first open": OPEN,
    "second open": OPEN,
    "json + pandas": """
import json, pandas as pd
def work(path):
    events = pd.DataFrame(json.loads(path.read_bytes())["traceEvents"])
    arguments = pd.DataFrame(events["args"].dropna().tolist())
""",
    "HTA": """
from hta.trace_analysis import TraceAnalysis
def work(path):
    analysis = TraceAnalysis(trace_files={0: path.name}, trace_dir=str(path.parent))
    analysis.get_temporal_breakdown(visualize=False)
    analysis.get_comm_comp_overlap(visualize=False)
    analysis.get_cuda_kernel_launch_stats(visualize=False)
""",
}
MAIN = """
if __name__ == "__main__":
    import sys, time, pathlib
    path = pathlib.Path(sys.argv[1])
    start = time.perf_counter()
    work(path)
    print("seconds", time.perf_counter() - start)
"""


def measure(way: str, trace: Path, python: str, limit_s: float) -> tuple[float, float] | str:
    """Seconds of work and peak megabytes, or why there are none."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryFile("w+") as output:
        command = [python, "-c", WORK[way] + MAIN, str(trace)]
        child = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        watch = _Watch(child.pid)
        watch.start()
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return f"more than {limit_s:.0f} s"
        finally:
            watch.stop()
        output.seek(0)
        lines = output.read().splitlines()
    seconds = next((float(line.split()[1]) for line in reversed(lines) if line.startswith("seconds ")), None)
    if child.returncode or seconds is None:
        return f"failed: {lines[-1][:80] if lines else child.returncode}"
    return seconds, watch.peak_bytes / 1e6


class _Watch(threading.Thread):
    """The highest sum of resident memory of a process and its children, looked at 20 times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._pid = pid
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.05):
            try:
                root = psutil.Process(self._pid)
                family = [root, *root.children(recursive=True)]
                self.peak_bytes = max(self.peak_bytes, sum(p.memory_info().rss for p in family))
            except psutil.Error:
                continue

    def stop(self) -> None:
        self._done.set()
        self.join()


def compare(sizes: list[float], ways: list[str], hta_python: str | None, folder: Path,
            limit_s: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for size in sizes:
        trace = folder / f"benchmark_{size:g}mb" / "rank0.pt.trace.json"
        trace.parent.mkdir(parents=True, exist_ok=True)
        if not trace.exists():
            subprocess.run([sys.executable, str(HERE / "make_trace.py"), str(trace), "--mb", str(size)], check=True,
                           stdout=subprocess.DEVNULL)
        for way in ways:
            python = sys.executable if way != "HTA" else hta_python
            if python is None:
                print("HTA is left out: give --hta-python", file=sys.stderr)
                continue
            if way == "first open":
                shutil.rmtree(trace.parent / ".chopper-cache", ignore_errors=True)
            rows.append({"size": size, "way": way, "result": measure(way, trace, python, limit_s)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def machine() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = psutil.virtual_memory().total / 2**30
    model = models[0] if models else platform.processor()
    return f"{model}, {processors()} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def table(rows: list[dict[str, object]]) -> str:
    lines = ["| trace | way | time | peak memory |", "|---|---|---|---|"]
    for row in rows:
        result = row["result"]
        cells = (f"{result[0]:.2f} s", f"{result[1]:,.0f} MB") if isinstance(result, tuple) else (str(result), "")
        lines.append(f"| {row['size']:g} MB | {row['way']} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--hta-python")
    parser.add_argument("--ways", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tb_chopper_benchmark")
    parser.add_argument("--limit", type=float, default=900, help="seconds after which a way is given up")
    args = parser.parse_args()
    began = time.strftime("%Y-%m-%d")
    rows = compare(args.mb, args.ways, args.hta_python, args.folder, args.limit)
    print(f"{began}, {machine()}\n\n    python {' '.join(sys.argv)}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
