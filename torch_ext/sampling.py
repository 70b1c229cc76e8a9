"""Starting and stopping the sampler from the training. Nothing here stops the training."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from torch_ext import owners

_NOT_FOR_A_CHILD = ("LD_PRELOAD", "HSA_TOOLS_LIB", "ROCPROFILER_REGISTER_LIBRARY")
_NOT_FOR_A_CHILD_PREFIXES = ("ROCP_", "ROCPROF")
"""a profiler around the training must not profile the sampler"""


class Telemetry:
    """A process's wish for telemetry. `stop` takes it back; the end of the process does the same."""

    def __init__(self, log_dir: Path, file: int | None, sampler: subprocess.Popen[bytes] | None) -> None:
        self._log_dir, self._file, self._sampler = log_dir, file, sampler
        self._pid = os.getpid()

    @property
    def sampler_pid(self) -> int | None:
        """The sampler, where this process started it."""
        return self._sampler.pid if self._sampler is not None else None

    def stop(self) -> None:
        """The sampler ends when the last process of the host has called this or has ended; waits two seconds for
        a sampler of its own."""
        if self._file is None or os.getpid() != self._pid:
            return
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            owners.remove(file, self._pid)
            if self._sampler is not None and not owners.living(file):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._sampler.wait(2)
        os.close(file)


def start_telemetry(log_dir: str | os.PathLike[str], hz: float | None = None) -> Telemetry:
    """Have `<host>.telemetry.csv` written into `log_dir` from now on, by one sampler per host however many ranks
    call this. hz: samples per second up to 100; by default 20, or fewer where that would cost more than 2 % of a
    core. What fails is told in one warning.
    """
    folder = Path(log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = owners.open_file(folder)
        owners.add(file, os.getpid())
        return Telemetry(folder, file, _spawn(folder, hz))
    except (OSError, ValueError) as error:
        warnings.warn(f"no telemetry: the sampler does not start: {' '.join(str(error).split())}; the training goes on",
                      RuntimeWarning, stacklevel=2)
        return Telemetry(folder, None, None)


@contextlib.contextmanager
def telemetry(log_dir: str | os.PathLike[str], hz: float | None = None) -> Iterator[Telemetry]:
    """`start_telemetry` around a block."""
    started = start_telemetry(log_dir, hz)
    try:
        yield started
    finally:
        started.stop()


def _spawn(folder: Path, hz: float | None) -> subprocess.Popen[bytes] | None:
    """A sampler that holds the lock, unless one runs. The lock goes with the descriptor that the child inherits."""
    file = owners.open_file(folder)
    try:
        if not owners.lock(file):
            return None
        command = [sys.executable, "-m", "torch_ext.sampler", "--out", str(folder), "--owners", str(file)]
        if hz is not None:
            command += ["--hz", str(hz)]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(file,), start_new_session=True,
            env=_environment())
    finally:
        os.close(file)


def _environment() -> dict[str, str]:
    """This process's, without profilers, and with this package within reach."""
    kept = {k: v for k, v in os.environ.items()
            if k not in _NOT_FOR_A_CHILD and not k.startswith(_NOT_FOR_A_CHILD_PREFIXES)}
    here = str(Path(__file__).resolve().parents[1])
    kept["PYTHONPATH"] = os.pathsep.join(p for p in (here, kept.get("PYTHONPATH", "")) if p)
    return kept
