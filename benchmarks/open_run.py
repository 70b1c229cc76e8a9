"""How long a run of many ranks takes to show: the first read, then every tab from the cache.

    python benchmarks/open_run.py [--ranks 8] [--layers 32] [--steps 10] [--run DIR]

Simulates a node (or takes a run that is there), reads it once into its cache, and shows every tab in a process of its
own that finds the cache: in the order of the tab bar, the tables that a tab shares with those before it already made.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tb_chopper import cli

VIEWS = """
import json, sys, time
began = time.perf_counter()
from tb_chopper import open_run
from tb_chopper.backend.views import REGISTRY
run = open_run(sys.argv[1])
times = {"imports": time.perf_counter() - began}
began = time.perf_counter()
rows = len(run.kernels)
times["tables from the cache"] = time.perf_counter() - began
for name in REGISTRY:
    began = time.perf_counter()
    json.dumps(run.view(name).as_dict())
    times[name] = time.perf_counter() - began
print(json.dumps([rows, times]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--run", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = args.run
        if run is None:
            cli.main(["simulate", folder, "--preset", "mi300x-llama3-8b", "--ranks", str(args.ranks),
                      "--layers", str(args.layers), "--steps", str(args.steps)])
            [run] = [p for p in Path(folder).iterdir() if p.is_dir()]
        began = time.perf_counter()
        read = "import sys, tb_chopper; tb_chopper.open_run(sys.argv[1]).kernels"
        subprocess.run([sys.executable, "-c", read, str(run)], check=True)
        print(f"first read, imports included: {time.perf_counter() - began:.2f} s")
        out = subprocess.run([sys.executable, "-c", VIEWS, str(run)], check=True, capture_output=True, text=True).stdout
        rows, times = json.loads(out.splitlines()[-1])
        print(f"{rows:,} kernels; from the cache:")
        for name, seconds in times.items():
            print(f"  {name:24} {seconds:6.2f} s")
        print(f"  {'all':24} {sum(times.values()):6.2f} s")
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"highest memory of one process: {peak:.0f} MB")


if __name__ == "__main__":
    main()
