"""How the GPUs of a host are linked, written once per host as the vendor's tool prints it: `<host>.topology.txt`.

Pure Python, no torch. Only the tool's answer is kept: no environment, no command lines (docs/topology.md).
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

SUFFIX = ".topology.txt"
Command = tuple[str, ...]
COMMANDS: tuple[tuple[Command, ...], ...] = (
    (("nvidia-smi", "topo", "-m"), ("nvidia-smi", "--query-gpu=index,pci.bus_id", "--format=csv,noheader")),
    (("amd-smi", "topology"),),
    (("rocm-smi", "--showtopo"),),
)
"""Alternatives, the first whose first command answers; the answers of its commands stand one below the other."""
TIMEOUT_S = 60
_NOT_SAFE = re.compile(r"[^A-Za-z0-9_.-]")


def file_name(host: str) -> str:
    """Name of a host's file inside the run."""
    return _NOT_SAFE.sub("_", host) + SUFFIX


def record(folder: Path, host: str, note: Callable[[str], None] = lambda text: None) -> threading.Thread:
    """Write the host's file, in a thread of its own: the tools take seconds. `note` is told what fails."""
    thread = threading.Thread(target=_record, args=(folder / file_name(host), note), daemon=True)
    thread.start()
    return thread


def ask(commands: Sequence[Sequence[Command]] = COMMANDS) -> str | None:
    """What the first tool that knows the links prints, None where none does."""
    for alternative in commands:
        if first := _answer(alternative[0]):
            return "\n".join([first, *filter(None, map(_answer, alternative[1:]))])
    return None


def _record(path: Path, note: Callable[[str], None]) -> None:
    text = ask()
    if text is None:
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError as error:
        note(f"topology cannot be written: {error.strerror or error}")
        with contextlib.suppress(OSError):
            unfinished.unlink()


def _answer(command: Command) -> str | None:
    """Standard output of a command, None where it fails, hangs, or is not there."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    text = done.stdout.decode(errors="replace")
    return text if done.returncode == 0 and text.strip() else None
