"""Time and memory to read the counters of a node: 8 ranks × the passes of the full preset, as rocprofv3 writes them.

    python benchmarks/read_counters.py [--ranks 8] [--steps 3] [--preset full] [--limit-s 15 --limit-gb 1.5]

The files are those of a simulated rank (Llama 3 8B, 32 layers), copied for every rank and pass under the names and
values of the preset's counters. Reading runs in a process of its own: seconds without imports, memory the highest of
the process. Prints a Markdown table of one line; ends with 1 where a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tb_chopper.backend.simulate import Options, simulate
from torch_ext.counter_plan import plan

CODE = """
import json, resource, sys, time
from pathlib import Path
from tb_chopper.backend.readers import counter_files
begin = time.perf_counter()
run = counter_files.read(Path(sys.argv[1]))
seconds = time.perf_counter() - begin
print(json.dumps({"s": seconds, "gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                  "dispatches": len(run.counters), "findings": [f.code for f in run.findings]}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="training steps in every pass")
    parser.add_argument("--preset", default="full")
    parser.add_argument("--limit-s", type=float, default=15.0)
    parser.add_argument("--limit-gb", type=float, default=1.5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        passes = write(Path(folder), arguments.ranks, arguments.steps, arguments.preset)
        size_mb = sum(p.stat().st_size for p in Path(folder).rglob("*.csv")) / 1e6
        done = subprocess.run([sys.executable, "-c", CODE, folder], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    print("| ranks × passes | files, MB | dispatches | read, s | memory, GB | CPUs |\n|---|---|---|---|---|---|")
    print(f"| {arguments.ranks} × {passes} | {size_mb:.0f} | {found['dispatches']:,} | {found['s']:.1f} | "
          f"{found['gb']:.2f} | {os.cpu_count()} |")
    return int(found["s"] > arguments.limit_s or found["gb"] > arguments.limit_gb)


def write(folder: Path, ranks: int, steps: int, preset: str) -> int:
    """counters/pass_N of every rank below `folder`; returns how many passes there are."""
    passes = plan(preset=preset, arch="gfx942").passes
    with tempfile.TemporaryDirectory() as simulated:
        run = simulate(simulated, Options("mi300x-llama3-8b", ranks=1, steps=steps, counter_steps=steps))[0]
        made = {path.parents[1].name: path for path in run.rglob("r0_*_counter_collection.csv")}
        for number, counters in enumerate(passes, 1):
            source = made[f"pass_{(number - 1) % len(made) + 1}"]
            pid = source.name.split("_")[1]
            text, agents = source.read_text(), source.with_name(f"r0_{pid}_agent_info.csv").read_text()
            own = [line.rsplit('"', 2)[1] for line in text.splitlines()[1:4]]
            for old, new in zip(own, counters, strict=False):
                text = text.replace(f'"{old}"', f'"{new}"')
            for rank in range(ranks):
                mine = str(10_000 * number + rank)
                place = folder / "counters" / f"pass_{number}" / "node0"
                place.mkdir(parents=True, exist_ok=True)
                (place / f"r{rank}_{mine}_counter_collection.csv").write_text(text.replace(f",{pid},", f",{mine},"))
                (place / f"r{rank}_{mine}_agent_info.csv").write_text(agents)
    return len(passes)


if __name__ == "__main__":
    sys.exit(main())
