"""Which processes want a sampler: one small file per log folder on the host's own disk, locked by the sampler.

Every process that wants telemetry appends `+pid start-time`, and `-pid start-time` when it no longer does. The
sampler holds the file's lock as long as it lives, so that there is one per host and folder however many ranks ask,
and stops when none of them is left. The kernel drops a lock with its process: a lock is never stale. The start time
tells a process from a later one with the same number.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import Counter
from pathlib import Path


def open_file(log_dir: Path) -> int:
    """Descriptor of the folder's file, made where it is missing. Raises OSError."""
    digest = hashlib.sha256(os.fsencode(log_dir.resolve())).hexdigest()[:16]
    # Ranks may have a TMPDIR each; this is the host's.
    shared = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    path = shared / f"tb-chopper-{os.getuid()}-{digest}.owners"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def lock(file: int) -> bool:
    """Take the lock for whoever holds `file`, children included; False where a sampler has it."""
    import fcntl  # not on Windows, where logs can still be read

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: int) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)


def add(file: int, pid: int) -> None:
    os.write(file, f"+{pid} {_start_time(pid)}\n".encode())


def remove(file: int, pid: int) -> None:
    os.write(file, f"-{pid} {_start_time(pid)}\n".encode())


def living(file: int) -> list[int]:
    """Processes that asked for a sampler, did not take it back, and live."""
    wanted: Counter[str] = Counter()
    for row in os.pread(file, 1 << 20, 0).decode("ascii", "replace").splitlines():
        wanted[row[1:]] += 1 if row.startswith("+") else -1
    pids = []
    for owner, n in wanted.items():
        pid, _, started = owner.partition(" ")
        if n > 0 and pid.isdecimal() and started == _start_time(int(pid)):
            pids.append(int(pid))
    return pids


def _start_time(pid: int) -> str:
    """Ticks from boot to the start of a process, "" where there is none; a zombie has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return _exists_without_proc(pid)
    return stat[19] if stat[0] not in "ZX" else ""


def _exists_without_proc(pid: int) -> str:
    """Where there is no /proc, a process is known by its number alone."""
    if Path("/proc/self/stat").exists():
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "?"
