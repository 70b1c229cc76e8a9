"""Runs, workers, spans and files of a log directory, local or behind an fsspec URL.

Only names, sizes and times are looked at: no file is opened. A directory with at least one trace is a run, named
by its path relative to the log directory (`.` for the directory itself).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any

from tb_chopper.backend.errors import NotFound

TRACE_PATTERNS = [
    r"^(?P<worker>.*?)(?:\.(?P<span>\d+))?\.pt\.trace\.json(?:\.gz)?$",  # torch.profiler's handler, and ours
    r"^(?P<worker>rank.*?)_trace\.json(?:\.gz)?$",  # torchtitan and others
    r"^(?P<worker>.+)_trace\.json\.gz$",
    r"^(?P<worker>libkineto_activities_.+?)\.json(?:\.gz)?$",  # on-demand profiling (dynolog)
    r"^(?P<worker>pytorch_trace_gpu.*?)\.json(?:\.gz)?$",
]
"""Names of trace files; the first that matches gives worker and span."""
SIDECAR = ".chopper.json"
TELEMETRY = ".telemetry.csv"
SNAPSHOT_PATTERN = r"snapshot.*\.(pickle|pkl)$"
"""Names of memory snapshots, wherever in the name it stands: rank0_memory_snapshot.pickle (torchtitan)."""
TOPOLOGY_PATTERN = r"(?:^|\.)topology\.(?:txt|json)$"
"""Names of files that tell how GPUs are linked: node0.topology.txt, topology.txt (docs/topology.md)."""
COUNTERS = "counters"

_TRACES = [re.compile(p) for p in TRACE_PATTERNS]
_SNAPSHOT = re.compile(SNAPSHOT_PATTERN, re.IGNORECASE)
_TOPOLOGY = re.compile(TOPOLOGY_PATTERN)
_STEM = re.compile(r"(?:\.pt\.trace)?\.json(?:\.gz)?$")
_RANK = re.compile(r"(?:^|[^A-Za-z])rank[-_]?(\d+)|_r(\d+)(?:_|$)", re.IGNORECASE)


class Url(str):
    """A path that only fsspec can open, with the name of its file."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return self.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class File:
    """`size` in bytes; `mtime_ns` is 0 where a remote store does not tell."""

    path: Path | Url
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class TraceFile(File):
    """`span` counts a worker's captures from 0; `rank` is only a hint from the file's name."""

    worker: str
    span: int
    rank: int | None
    sidecar: File | None


@dataclass(frozen=True)
class RunFiles:
    """One run: its traces in order of worker and span, and what lies beside them."""

    name: str
    path: Path | Url
    traces: tuple[TraceFile, ...]
    telemetry: tuple[File, ...] = ()
    counters: tuple[File, ...] = ()
    snapshots: tuple[File, ...] = ()
    topology: tuple[File, ...] = ()

    @property
    def files(self) -> tuple[File, ...]:
        """Every file that the run's numbers come from."""
        sidecars = tuple(t.sidecar for t in self.traces if t.sidecar)
        return (*self.traces, *sidecars, *self.telemetry, *self.counters, *self.snapshots, *self.topology)


Listing = dict[str, dict[str, File]]
"""Directory relative to the root (`.` for itself) -> file name -> file."""


def find_runs(roots: str | Path | Mapping[str, str | Path]) -> list[RunFiles]:
    """The runs below a directory (or URL), or one trace file as a run of its own, whatever its name is.

    With several roots by name, a run is called `name/relative path`, or `name` where the root itself is the run.
    What is missing, unreadable or removed meanwhile is left out: see `why_no_run`.
    """
    if isinstance(roots, Mapping):
        return [_renamed(run, prefix) for prefix, root in roots.items() for run in find_runs(root)]
    path = _path(roots)
    if (named := _file(path)) is not None:
        return [_single(named)]
    listing = _local(path) if isinstance(path, Path) else _remote(path)
    return [run for directory in sorted(listing) if (run := _run(path, directory, listing)) is not None]


def why_no_run(root: str | Path) -> str:
    """One line for a person: why there is no run, and what to do."""
    path = _path(root)
    if isinstance(path, Path):
        if not path.exists():
            return f"{root}: no such file or directory"
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            return f"{root}: no permission to list it; give this user read access"
    return f"{root}: no *.pt.trace.json[.gz] file here; record one with torch_ext.chopper_trace_handler"


def rank_hint(name: str) -> int | None:
    """The rank that a file or worker name tells, e.g. `rank3` or `node0_r3_4711`."""
    match = _RANK.search(name)
    return int(match[1] or match[2]) if match else None


def _path(path: str | Path) -> Path | Url:
    return Url(path) if "://" in str(path) else Path(path)


def _renamed(run: RunFiles, prefix: str) -> RunFiles:
    name = run.name if not prefix else prefix if run.name == "." else f"{prefix}/{run.name}"
    return replace(run, name=name)


def _single(file: File) -> RunFiles:
    path, name = file.path, file.path.name
    folder = path.parent if isinstance(path, Path) else Url(path[: -len(name) - 1])
    sidecar_name = _sidecar_name(name)
    sidecar = _file(_join(folder, sidecar_name))
    match = _match(name)
    worker = match["worker"] if match else _STEM.sub("", name)
    return RunFiles(name, folder, (_trace(file, worker, 0, {sidecar_name: sidecar} if sidecar else {}),))


def _join(folder: Path | Url, name: str) -> Path | Url:
    return Url(f"{folder}/{name}") if isinstance(folder, Url) else folder / name


def _file(path: Path | Url) -> File | None:
    """The file of this path, None for a directory and for what is not there."""
    try:
        if isinstance(path, Path):
            stat = path.stat()
            return File(path, stat.st_size, stat.st_mtime_ns) if S_ISREG(stat.st_mode) else None
        fs, inner = _remote_store(path)
        info = fs.info(inner)
    except OSError:
        return None
    return File(path, int(info.get("size") or 0), _mtime_ns(info)) if info.get("type") == "file" else None


def _run(root: Path | Url, directory: str, listing: Listing) -> RunFiles | None:
    files = listing[directory]
    spans: dict[str, list[tuple[int, str]]] = {}
    for name in files:
        if match := _match(name):
            spans.setdefault(match["worker"], []).append((int(match.groupdict().get("span") or -1), name))
    if not spans:
        return None
    traces = tuple(
        _trace(files[name], worker, i, files)
        for worker, own in sorted(spans.items(), key=lambda item: _natural(item[0]))
        for i, (_, name) in enumerate(sorted(own)))
    below = COUNTERS if directory == "." else f"{directory}/{COUNTERS}"
    counters = [
        f for other, own in listing.items() if other == below or other.startswith(f"{below}/") for f in own.values()]
    telemetry = [f for name, f in files.items() if name.endswith(TELEMETRY)]
    path = root if directory == "." else _join(root, directory)
    snapshots = [f for name, f in files.items() if _SNAPSHOT.search(name)]
    topology = [f for name, f in files.items() if _TOPOLOGY.search(name)]
    return RunFiles(directory, path, traces, _sorted(telemetry), _sorted(counters), _sorted(snapshots),
                    _sorted(topology))


def _trace(file: File, worker: str, span: int, beside: Mapping[str, File]) -> TraceFile:
    sidecar = beside.get(_sidecar_name(file.path.name))
    return TraceFile(file.path, file.size, file.mtime_ns, worker, span, rank_hint(worker), sidecar)


def _match(name: str) -> re.Match[str] | None:
    return next((m for p in _TRACES if (m := p.match(name))), None)


def _sidecar_name(name: str) -> str:
    return _STEM.sub("", name) + SIDECAR


def _sorted(files: list[File]) -> tuple[File, ...]:
    return tuple(sorted(files, key=lambda f: str(f.path)))


def _natural(name: str) -> list[tuple[int, str]]:
    """rank2 before rank10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _wanted(name: str, below_counters: bool) -> bool:
    ours = below_counters or name.endswith((SIDECAR, TELEMETRY)) or bool(
        _match(name) or _SNAPSHOT.search(name) or _TOPOLOGY.search(name))
    return ours and not name.startswith(".")


def _local(root: Path) -> Listing:
    listing: Listing = {}
    for directory, relative in _directories(root):
        below_counters = COUNTERS in relative.parts
        for entry in _entries(directory):
            if _wanted(entry.name, below_counters):
                try:
                    if entry.is_file():
                        stat = entry.stat()
                        file = File(Path(entry.path), stat.st_size, stat.st_mtime_ns)
                        listing.setdefault(str(relative), {})[entry.name] = file
                except OSError:
                    continue
    return listing


def _directories(root: Path) -> Iterator[tuple[Path, PurePosixPath]]:
    """The directory and all below it, links followed, each once: a link may lead back up."""
    seen: set[tuple[int, int]] = set()
    stack = [(root, PurePosixPath("."))]
    while stack:
        directory, relative = stack.pop()
        try:
            stat = directory.stat()
        except OSError:
            continue
        if (stat.st_dev, stat.st_ino) in seen:
            continue
        seen.add((stat.st_dev, stat.st_ino))
        yield directory, relative
        below = [e for e in _entries(directory) if not e.name.startswith(".") and _is_dir(e)]
        stack += [(Path(e.path), relative / e.name) for e in below]


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda e: e.name)
    except OSError:
        return []


def _remote(url: Url) -> Listing:
    fs, root = _remote_store(url)
    listing: Listing = {}
    try:
        found: dict[str, dict[str, Any]] = fs.find(root, detail=True)
    except OSError:
        return listing
    for path, info in found.items():
        relative = PurePosixPath(path[len(root) :].lstrip("/"))
        folder = relative.parent
        if any(part.startswith(".") for part in folder.parts) or not _wanted(relative.name, COUNTERS in folder.parts):
            continue
        file = File(Url(fs.unstrip_protocol(path)), int(info.get("size") or 0), _mtime_ns(info))
        listing.setdefault(str(folder), {})[relative.name] = file
    return listing


def _remote_store(url: Url) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise NotFound(f"{url}: opening a URL needs fsspec; install tb-chopper[remote]") from error
    try:
        store, inner = url_to_fs(str(url))
    except (ImportError, ValueError) as error:
        raise NotFound(f"{url}: no store for this kind of URL: {error}") from error
    return store, inner


def _mtime_ns(info: dict[str, Any]) -> int:
    """Local stores give seconds, object stores a datetime under names of their own."""
    keys = ("mtime", "LastModified", "last_modified", "updated", "created")
    value = next((info[key] for key in keys if key in info), 0)
    seconds = value.timestamp() if hasattr(value, "timestamp") else value
    return int(seconds * 1e9) if isinstance(seconds, int | float) else 0
