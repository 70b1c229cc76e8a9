"""The counters of a run, through the cache: dozens of text files that never change once they are written."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tb_chopper.backend import cache, logdir
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.logdir import RunFiles
from tb_chopper.backend.readers import counter_files
from tb_chopper.backend.readers.counter_files import CounterRun


def load(files: RunFiles) -> CounterRun:
    """The run's counters folder as tables; empty where there is none. A remote run's counters are not read: a finding
    says so."""
    if not files.counters:
        return counter_files.nothing()
    if not isinstance(files.path, Path):
        nothing = counter_files.nothing()
        nothing.findings.append(Finding("counters_remote", "warning", "counter files behind a URL are not read: copy "
                                        "the run's directory to this machine", len(files.counters)))
        return nothing
    folder = files.path / logdir.COUNTERS
    state = [(str(f.path), f.size, f.mtime_ns) for f in files.counters]
    key = hashlib.sha256(repr(state).encode()).hexdigest()
    cached = cache.load(folder, key)
    if cached is not None:
        frames, stored = cached
        ranks = {(int(p), str(host), int(process)): int(rank) for p, host, process, rank in stored["ranks"]}
        return CounterRun(frames["counters"], frames["dispatches"], frames["agents"],
                          [Finding(**f) for f in stored["findings"]], ranks)
    run = counter_files.read(folder)
    cache.store(folder, key, {"counters": run.counters, "dispatches": run.dispatches, "agents": run.agents},
                {"findings": [f.as_dict() for f in run.findings], "ranks": [[*k, r] for k, r in run.ranks.items()]})
    return run
