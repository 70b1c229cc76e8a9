"""Augmented traces for the browser: written once per state of a run, in a folder that goes with the process."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

KEPT = 8
NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.json\.gz")


class TraceFiles:
    """Thread-safe. A trace of a run's earlier state goes when the new one is written, and so do all but the newest."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()

    def written(self, run: str, signature: str, source: str, write: Callable[[Path], object]) -> Path:
        """The augmented trace of file `source` of `run`; `write(path)` makes it where it is not there yet."""
        prefix, state = _digest(run, source), _digest(signature)
        path = self._below() / f"{prefix}-{state}.json.gz"
        if path.exists():
            os.utime(path)
            return path
        write(path)
        files = sorted(path.parent.glob("*.json.gz"), key=_used_ns, reverse=True)
        for i, other in enumerate(files):
            if other != path and (i >= KEPT or other.name.startswith(prefix)):
                with suppress(OSError):
                    other.unlink()
        return path

    def find(self, name: str) -> Path | None:
        """A trace that is here by the name of its file."""
        if not NAME.fullmatch(name):
            return None
        path = self._below() / name
        return path if path.is_file() else None

    def _below(self) -> Path:
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="tb-chopper-", ignore_cleanup_errors=True)
            return Path(self._folder.name)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:16]


def _used_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
