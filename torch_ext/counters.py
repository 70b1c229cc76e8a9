"""Collect hardware counters: run a command again under rocprofv3 (or Nsight Compute), pass by pass.

    from torch_ext import counters
    report = counters.collect(["torchrun", "--nproc-per-node=8", "train.py"], out="log/my_run")

Every kernel is serialized while counters run, so a pass is slower than the training, and a job whose collectives of
several communicators overlap can deadlock: each pass runs in a process group of its own under a watchdog. What one
pass has written stays, whatever happens to the next.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch_ext.counter_plan import NCU_METRICS, PRESETS, Plan, PlanError, architecture, plan

PASS_VARIABLE = "TB_CHOPPER_PASS"
"""Set to the folder of the pass in the environment of a counter run: no trace is recorded there (counter_pass.py)."""
FOLDER = "counters"
STATE = "collection.json"
LOG = "log.txt"

DONE, FAILED, TIMED_OUT, STALLED, EMPTY = "done", "failed", "timed_out", "stalled", "empty"
Progress = Callable[[str], None]

_INHERITED = re.compile(r"^(ROCP_|ROCPROF|HSA_TOOLS_|LD_PRELOAD$|KINETO_|CUDA_INJECTION|NSYS_|NVPW_)")
_LOCKED = {
    "has a profiler attached": "another profiler is counting on this GPU: its and these values are wrong; stop it",
    "could not be locked": "no permission to lock the GPU's counters (CAP_PERFMON): others may count meanwhile",
    "does not support locking": "the driver cannot lock counters: make sure nobody else counts meanwhile",
    "CONFIGURATION_LOCKED": "torch has its own rocprofiler loaded: use the rocprofv3 of torch's ROCm release",
}
_FORGOTTEN = "collectives of several communicators (tensor, pipeline or expert parallel) can deadlock while kernels " \
             "are serialized; try it first with AMD_SERIALIZE_KERNEL=3 or CUDA_LAUNCH_BLOCKING=1, or collect on a " \
             "smaller job of the same shapes"


class CollectError(RuntimeError):
    """Nothing could be collected; one line, with the remedy."""


@dataclass(frozen=True)
class Profiler:
    kind: str
    """rocprofv3 or ncu"""
    path: str


@dataclass
class PassResult:
    number: int
    counters: list[str]
    status: str = ""
    seconds: float = 0.0
    processes: int = 0
    """processes that wrote counters"""
    notes: list[str] = field(default_factory=list)


@dataclass
class Report:
    """`folder` holds a folder per pass; `ok` where every pass has its counters from every process."""

    folder: Path
    passes: list[PassResult]
    notes: list[str]

    @property
    def ok(self) -> bool:
        return all(p.status == DONE and not p.notes for p in self.passes)


# ---- finding a profiler


def find_profiler(environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> Profiler:
    """rocprofv3, else ncu: from PATH, the places where ROCm and CUDA install it, and this Python's own packages.

    Raises CollectError, which says how to get one.
    """
    env = os.environ if environment is None else environment
    rocm = [Path(env["ROCM_PATH"]) / "bin"] if env.get("ROCM_PATH") else []
    rocm += [Path(sys.prefix) / "bin", root / "opt/rocm/bin", *sorted((root / "opt").glob("rocm-*/bin"), reverse=True)]
    cuda = [Path(env["CUDA_HOME"]) / "bin"] if env.get("CUDA_HOME") else []
    cuda += [root / "usr/local/cuda/bin", *sorted((root / "opt/nvidia/nsight-compute").glob("*"), reverse=True)]
    for name, places in (("rocprofv3", rocm), ("ncu", cuda)):
        found = shutil.which(name, path=os.pathsep.join([env.get("PATH", ""), *map(str, places)]))
        if found:
            return Profiler(name, found)
    if importlib.util.find_spec("rocm_sdk"):
        raise CollectError("the ROCm packages of this Python have no rocprofv3: pip install rocm-sdk-core of the same "
                           "version")
    raise CollectError("neither rocprofv3 nor ncu was found: rocprofv3 comes with ROCm 6.2 and later (apt install "
                       "rocprofiler-sdk, or set ROCM_PATH), ncu with the CUDA toolkit")


def command_of(profiler: Profiler, counters: Sequence[str], folder: Path, command: Sequence[str]) -> list[str]:
    """The command of one pass. Its files carry host, rank and process id, so that no process overwrites another's."""
    if profiler.kind == "ncu":
        # Collectives never end when their kernels run one by one, so they stay unprofiled.
        return [profiler.path, "--csv", "--page", "raw", "--print-units", "base", "--target-processes", "all",
                "--clock-control", "none", "--cache-control", "none", "--print-kernel-base", "mangled",
                "--kernel-name", "regex:^(?!.*(nccl|nvshmem))", "--metrics", ",".join(counters),
                "--log-file", str(folder / "%h_r%q{RANK}_%p.csv"), *command]
    return [profiler.path, "--pmc", *counters, "--kernel-trace", "--marker-trace", "-f", "csv", "-d", str(folder),
            "-o", "%hostname%/r%env{RANK}%_%pid%", "--", *command]


def environment_of(folder: Path, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of one pass: without what other profilers left in it, and with patience for slow collectives."""
    source = os.environ if environment is None else environment
    clean = {k: v for k, v in source.items() if not _INHERITED.match(k)}
    # NCCL's and RCCL's own watchdogs would take serialized kernels for a hang.
    patience = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    return {**patience, **clean, PASS_VARIABLE: str(folder.absolute())}


# ---- running


def collect(command: Sequence[str], out: str | Path, *, counters: Sequence[str] = (), preset: str = "breakdown",
            per_pass: int = 3, time_limit_s: float = 3600.0, stall_limit_s: float = 600.0, grace_s: float = 10.0,
            resume: bool = False, dry_run: bool = False, profiler: Profiler | None = None,
            progress: Progress = lambda text: print(text, file=sys.stderr, flush=True)) -> Report:
    """Run `command` once per pass and leave the profiler's files in `out`/counters/pass_N.

    A pass is stopped after `time_limit_s`, or when it has written nothing (output or files) for `stall_limit_s`: its
    process group gets SIGINT, SIGTERM and SIGKILL, `grace_s` apart. `resume` keeps the passes that an earlier call of
    the same command finished. `dry_run` only reports the commands. Raises CollectError or PlanError.
    """
    if not command:
        raise CollectError("no command to run: give it behind `--`, e.g. -- torchrun --nproc-per-node=8 train.py")
    profiler = profiler or find_profiler()
    planned = (Plan((tuple(counters or NCU_METRICS),)) if profiler.kind == "ncu"
               else plan(counters, preset, architecture(), per_pass))
    folder = Path(out) / FOLDER
    results = [PassResult(i, list(names)) for i, names in enumerate(planned.passes, 1)]
    notes = [*planned.notes, *([_FORGOTTEN] if _distributed(command) else [])]
    for note in notes:
        progress(note)
    if dry_run:
        for p in results:
            line = command_of(profiler, p.counters, folder / f"pass_{p.number}", command)
            progress(shlex.join(line))
        return Report(folder, results, notes)
    folder.mkdir(parents=True, exist_ok=True)
    finished = _finished(folder, command) if resume else {}
    for p in results:
        before = finished.get(p.number)
        if before and before.counters == p.counters:
            p.__dict__.update(before.__dict__)
            progress(f"pass {p.number} of {len(results)}: done before")
            continue
        progress(f"pass {p.number} of {len(results)}: {', '.join(p.counters)}")
        _run(p, profiler, folder / f"pass_{p.number}", command, time_limit_s, stall_limit_s, grace_s)
        _save(folder, command, results)
        progress(f"pass {p.number} of {len(results)}: {p.status} after {p.seconds:.0f} s, {p.processes} process(es)"
                 + "".join(f"; {note}" for note in p.notes))
    _compare(results)
    _save(folder, command, results)
    return Report(folder, results, notes)


def _run(p: PassResult, profiler: Profiler, folder: Path, command: Sequence[str], time_limit_s: float,
         stall_limit_s: float, grace_s: float) -> None:
    """Run one pass and fill in its result."""
    # Only what an earlier try of this very pass left: a mixture of two runs would match nothing.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()
    with (folder / LOG).open("wb") as log:
        try:
            process = subprocess.Popen(
                command_of(profiler, p.counters, folder, command), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, env=environment_of(folder), start_new_session=True)
        except OSError as error:
            raise CollectError(f"{profiler.path} does not start: {error.strerror or error}") from error
        ended_by = _watch(process, folder, time_limit_s, stall_limit_s, grace_s)
    p.seconds = time.monotonic() - started
    written = _written(folder)
    p.processes = sum(bool(names) for names in written.values())
    seen = set().union(*written.values()) if written else set()
    if ended_by:
        p.status = ended_by
    elif not seen:
        # Some releases end with 0 and write nothing when a counter does not exist.
        p.status = FAILED if process.returncode else EMPTY
    else:
        p.status = DONE
        if process.returncode:
            p.notes.append(f"the program ended with {process.returncode}")
        lost = [c for c in p.counters if c not in seen]
        if lost and profiler.kind == "rocprofv3":
            p.notes.append(f"no values of {', '.join(lost)}")
    p.notes += _complaints(folder / LOG)
    if p.status != DONE:
        p.notes.append(f"see {folder / LOG}")


def _watch(process: subprocess.Popen[bytes], folder: Path, time_limit_s: float, stall_limit_s: float, grace_s: float,
           ) -> str:
    """Wait for the end; the reason where it had to be brought about, else an empty text."""
    started = moved = time.monotonic()
    size = -1
    try:
        while True:
            try:
                process.wait(min(1.0, stall_limit_s / 5, time_limit_s / 5))
                return ""
            except subprocess.TimeoutExpired:
                now, grown = time.monotonic(), _size(folder)
            if grown != size:
                size, moved = grown, now
            if now - started > time_limit_s:
                return TIMED_OUT
            if now - moved > stall_limit_s:
                return STALLED
    finally:
        # Also behind a launcher that died and left its workers, and when the user interrupts.
        _stop(process, grace_s)


def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End the pass's own process group, politely first: rocprofv3 writes its files on SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if not _alive(process.pid):
            break
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and _alive(process.pid):
            process.poll()
            time.sleep(0.02)
    process.wait()


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


# ---- what a pass left


def _size(folder: Path) -> int:
    """Bytes of all files, which grow while the pass gets on."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


def _written(folder: Path) -> dict[str, set[str]]:
    """The counters that each file has values of."""
    out = {}
    for path in sorted(folder.rglob("*.csv")):
        csv.field_size_limit(1 << 24)
        with path.open(newline="", errors="replace") as stream:
            if path.name.endswith("_counter_collection.csv"):
                out[path.name] = {row.get("Counter_Name") or "" for row in csv.DictReader(stream)} - {""}
            elif any(line.startswith('"ID",') for line in stream):
                out[path.name] = {"ncu"} if any(re.match(r'"\d', line) for line in stream) else set()
    return out


def _complaints(log: Path) -> list[str]:
    text = log.read_text(errors="replace")
    return [meaning for words, meaning in _LOCKED.items() if words in text]


def _compare(results: list[PassResult]) -> None:
    """A rank that is missing from one pass is seen beside the others."""
    most = max((p.processes for p in results), default=0)
    for p in results:
        note = f"{p.processes} of {most} processes wrote counters"
        if p.status == DONE and p.processes < most and note not in p.notes:
            p.notes.append(note)


def _distributed(command: Sequence[str]) -> bool:
    return any(re.search(r"torchrun|torch\.distributed|mpirun|srun|deepspeed|accelerate", word) for word in command)


def _save(folder: Path, command: Sequence[str], results: list[PassResult]) -> None:
    """The state for `resume`. Of the command only a digest: it may hold a token."""
    state = {"command": _digest(command), "passes": [asdict(p) for p in results if p.status]}
    (folder / STATE).write_text(json.dumps(state, indent=1))


def _finished(folder: Path, command: Sequence[str]) -> dict[int, PassResult]:
    try:
        state = json.loads((folder / STATE).read_text())
        passes = [PassResult(**p) for p in state["passes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if state.get("command") != _digest(command):
        return {}
    return {p.number: p for p in passes if p.status == DONE and _written(folder / f"pass_{p.number}")}


def _digest(command: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(command).encode()).hexdigest()


# ---- tb-chopper collect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tb-chopper collect`."""
    parser.add_argument("--out", required=True, metavar="DIR", help="the run's directory, beside its traces; the "
                        f"counters go to DIR/{FOLDER}/pass_N")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--preset", choices=tuple(PRESETS), default="breakdown",
                      help="which question to answer (default: %(default)s)")
    what.add_argument("--counters", metavar="A,B", default="", help="counters (rocprofv3) or metrics (ncu) by name")
    parser.add_argument("--per-pass", type=int, default=3, metavar="N",
                        help="counters in one run of the command (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, default=3600.0, metavar="S",
                        help="seconds after which a pass is stopped (default: %(default)g)")
    parser.add_argument("--stall-limit", type=float, default=600.0, metavar="S",
                        help="seconds without output or growing files after which it is (default: %(default)g)")
    parser.add_argument("--resume", action="store_true", help="keep the passes that the same command finished before")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...",
                        help="the training, as you run it; a few steps are enough")


def run(args: argparse.Namespace) -> int:
    """Collect. Returns 0, 1 where a pass lacks something, or 2 with one line on stderr where nothing can be run."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        report = collect(
            command, args.out, counters=[c for c in args.counters.split(",") if c], preset=args.preset,
            per_pass=args.per_pass, time_limit_s=args.time_limit, stall_limit_s=args.stall_limit, resume=args.resume,
            dry_run=args.dry_run)
    except (CollectError, PlanError) as error:
        print(f"tb-chopper collect: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        return 0
    print(report.folder)
    return 0 if report.ok else 1
