"""The runs of a log directory for a server: scanned in the background, opened on demand, with progress."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tb_chopper.backend.logdir import RunFiles
    from tb_chopper.backend.run import Run

LOG = logging.getLogger(__name__)

Report = Callable[[float, str], None]
"""Told how far a job is (0 to 1) and what it is doing."""

RESCAN_S = 5.0
MAX_OPEN_RUNS = 4
MAX_RESULTS = 128
READING = 0.9
"""Share of a job's progress that reading takes; the rest is computing."""


@dataclass(frozen=True)
class Listed:
    """One run of the last scan. `signature` changes when a file of the run comes, goes or changes."""

    name: str
    files: RunFiles
    signature: str
    n_files: int
    bytes: int
    modified_s: float


@dataclass(frozen=True)
class Listing:
    """The last scan. `generation` grows whenever a scan finds something changed; 0 before the first."""

    generation: int = 0
    runs: Mapping[str, Listed] = field(default_factory=dict)
    error: str = ""


@dataclass
class Job:
    """One computation under way: its future, how far it is (0 to 1) and what it is doing."""

    future: Future[str] = field(default_factory=Future)
    done: float = 0.0
    doing: str = "Starting"
    started_s: float = field(default_factory=time.monotonic)

    def report(self, done: float, doing: str) -> None:
        self.done, self.doing = max(self.done, min(done, 1.0)), doing


class _Open:
    """A run held open, and the lock that makes its lazy properties safe."""

    def __init__(self, signature: str) -> None:
        self.signature = signature
        self.lock = threading.RLock()
        self.run: Run | None = None
        self.report: Report = lambda done, doing: None


class RunStore:
    """Runs under one or several log directories (`roots`: name to path; the name "" adds no prefix).

    Thread-safe. Nothing but the background thread walks the directories; the request threads see its last listing.
    """

    def __init__(self, roots: Mapping[str, str]) -> None:
        self._roots = dict(roots)
        self._listing = Listing()
        self._scanned = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._jobs: dict[tuple[str, ...], Job] = {}
        self._results: OrderedDict[tuple[str, ...], str] = OrderedDict()
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="chopper")

    # ---- what there is -------------------------------------------------------------------------------------------

    def listing(self, wait_s: float = 0.0) -> Listing:
        """The last scan; waits up to `wait_s` for the first one. Starts the background scan."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._scan_for_ever, name="chopper-scan", daemon=True)
                self._thread.start()
        self._scanned.wait(wait_s)
        return self._listing

    def rescan(self) -> None:
        """Lets the background thread look again now."""
        self._wake.set()

    def _scan_for_ever(self) -> None:
        while True:
            started = time.monotonic()
            self.scan()
            # A slow (remote) directory is looked at less often, so that scanning stays below a tenth of the time.
            self._wake.wait(max(RESCAN_S, 10 * (time.monotonic() - started)))
            self._wake.clear()

    def scan(self) -> Listing:
        """Looks at the directories now."""
        error, runs = "", dict[str, Listed]()
        try:
            runs = {r.name: r for r in _find_runs(self._roots)}
        except Exception as e:  # a directory that went away must not end the thread
            LOG.warning("Chopper cannot list the log directory: %s", e)
            error = f"The log directory cannot be listed: {e}"
        old = self._listing
        if runs != old.runs or error != old.error or old.generation == 0:
            self._listing = Listing(old.generation + 1, runs, error)
        self._scanned.set()
        return self._listing

    # ---- what is in it -------------------------------------------------------------------------------------------

    def ask(
        self, key: tuple[str, ...], listed: list[Listed], compute: Callable[..., str], wait_s: float, keep: bool = True
    ) -> str | Job:
        """The text that `compute(report, *runs)` makes, or the job that makes it when that takes longer than `wait_s`.

        `key` names the computation; a result is kept until a run changes, or until it is asked for once where `keep`
        is False. Raises what `compute` raises.
        """
        key = (*key, *(f"{r.name}@{r.signature}" for r in listed))
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                return self._results[key]
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = Job()
                job.future = self._pool.submit(self._work, key, job, listed, compute, keep)
        wait([job.future], timeout=wait_s)
        if not job.future.done():
            return job
        with self._lock:
            self._jobs.pop(key, None)
        return job.future.result()

    def _work(
        self, key: tuple[str, ...], job: Job, listed: list[Listed], compute: Callable[..., str], keep: bool
    ) -> str:
        text = self._compute(job, listed, compute)
        if not keep:
            return text
        with self._lock:
            self._results[key] = text
            while len(self._results) > MAX_RESULTS:
                self._results.popitem(last=False)
            self._jobs.pop(key, None)
        return text

    def _compute(self, job: Job, listed: list[Listed], compute: Callable[..., str]) -> str:
        with ExitStack() as stack:
            holders = {r.name: self._holder(r) for r in listed}
            # Locks are taken in the order of names: two comparisons of the same two runs cannot block each other.
            for name in sorted(holders):
                lock = holders[name].lock
                if not lock.acquire(blocking=False):
                    job.report(0.0, "Waiting for another read to finish")
                    lock.acquire()
                stack.callback(lock.release)
            runs = [self._opened(r, holders[r.name], job, i, len(listed)) for i, r in enumerate(listed)]
            return compute(job.report, *runs)

    def _holder(self, listed: Listed) -> _Open:
        with self._lock:
            holder = self._open.get(listed.name)
            if holder is None or holder.signature != listed.signature:
                holder = self._open[listed.name] = _Open(listed.signature)
            self._open.move_to_end(listed.name)
            while len(self._open) > MAX_OPEN_RUNS:
                self._open.popitem(last=False)
            return holder

    def _opened(self, listed: Listed, holder: _Open, job: Job, i: int, n: int) -> Run:
        """The run, whose reads from now on report to `job`; it is the i-th of n that the job needs."""
        from tb_chopper.backend.run import Run

        holder.report = lambda done, doing: job.report(READING * (i + done) / n, f"{listed.name}: {doing}")
        if holder.run is None:
            holder.run = Run(listed.files, progress=lambda done, doing: holder.report(done, doing))
        job.report(0.0, f"Reading {listed.name}")
        # Before Python 3.12 all instances share a cached property's lock: no long read inside one.
        _ = holder.run.captures
        return holder.run


def _find_runs(roots: Mapping[str, str]) -> list[Listed]:
    """Every directory with trace files below the roots."""
    from tb_chopper.backend import logdir

    found = []
    for run in logdir.find_runs(roots):
        files = [(str(f.path), f.size, f.mtime_ns) for f in run.files]
        signature = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
        found.append(
            Listed(
                run.name,
                run,
                signature,
                len(files),
                sum(size for _, size, _ in files),
                max((mtime / 1e9 for _, _, mtime in files), default=0.0),
            )
        )
    return found


def split_logdir(logdir: str, logdir_spec: str = "") -> dict[str, str]:
    """`--logdir` or `--logdir_spec` (name1:path1,path2) as roots by name, as TensorBoard reads them."""
    if not logdir_spec:
        return {"": logdir} if logdir else {}
    roots: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in logdir_spec.split(","))):
        name, colon, path = part.partition(":")
        # `s3://bucket` and `/a:b` are paths, not names.
        if not colon or path.startswith("//") or name.startswith("/") or os.path.splitdrive(part)[0]:
            name = path = part
        roots[name] = path if "://" in path else os.path.expanduser(path)
    return roots


def as_state(job: Job) -> dict[str, Any]:
    """A job for the wire."""
    return {
        "state": "loading",
        "done": round(job.done, 3),
        "doing": job.doing,
        "elapsed_s": round(time.monotonic() - job.started_s, 1),
    }
