"""Host names and paths out of what leaves the machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

_NAME = r"[\w.+@~-]+"
# A path begins where no name, folder or bracket stands before its first separator. (The separator comes first and the
# look behind it second: so the search for it is a scan.)
_FIRST = r"[/\\](?<![\w.)\]}\\/][/\\])"
_DRIVE = re.compile(r"(?<!\w)[A-Za-z]:(?=[/\\])")
_HOST_KEYS = re.compile(rb'("(?:host_?name|host)"\s*:\s*)"(?:[^"\\]|\\.)*"', re.IGNORECASE)


def _patterns(first: str, separator: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A home folder with its owner, and the folders of a path (or URL) from its root to its last name."""
    s = f"(?:{separator})"
    return re.compile(f"{first}(?:home|Users){s}{_NAME}"), re.compile(f"{first}{s}{{0,2}}(?:{_NAME}{s})+")


_TEXT = _patterns(_FIRST, r"[/\\]")
# In JSON text a single backslash is the beginning of an escape (\u6838), not of a folder.
_JSON = _patterns(_FIRST + r"(?:(?<=/)|[/\\])", r"/|\\/|\\\\")


class Redactor:
    """Replaces every given host name by `host0`, `host1`, ... and leaves of a path only its last name."""

    def __init__(self, hosts: Iterable[str]) -> None:
        names = sorted({h for h in hosts if h}, key=lambda h: (-len(h), h))
        self._place = {name: f"host{i}" for i, name in enumerate(sorted(names))}
        # A host stands alone or begins a worker's name (node0_r0_4711), and a word of a format (gpu_memcpy) is none.
        alternatives = "|".join(map(re.escape, names))
        self._hosts = re.compile(rf"(?<![\w-])(?:{alternatives})(?![A-Za-z0-9-]|_(?!r?\d))") if names else None

    @classmethod
    def of_runs(cls, *runs: Run) -> Redactor:
        """A redactor that knows the hosts of runs, as their traces, sidecars and telemetry name them."""
        return cls(str(host) for run in runs for host in (
            *run.workers["host"].dropna(), *run.telemetry.samples["host"].dropna().unique(),
            *(c.meta.get("host_name") or "" for c in run.captures)))

    def text(self, text: str) -> str:
        """One text."""
        return self._redacted(text, *_TEXT)

    def json(self, text: bytes) -> bytes:
        """A piece of JSON text."""
        return self._redacted(text.decode(), *_JSON).encode()

    def metadata(self, text: bytes) -> bytes:
        """A piece of JSON text in which the value of a key that names a host goes, whatever it is."""
        return _HOST_KEYS.sub(rb'\1"redacted"', self.json(text))

    def tree(self, value: Any) -> Any:
        """Every string of nested dicts and lists, keys left as they are."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.tree(v) for key, v in value.items()}
        return [self.tree(v) for v in value] if isinstance(value, list | tuple) else value

    def _redacted(self, text: str, home: re.Pattern[str], folders: re.Pattern[str]) -> str:
        if ":\\" in text or ":/" in text:
            text = _DRIVE.sub("", text)
        text = folders.sub("", home.sub("/home", text))
        named = self._hosts and any(name in text for name in self._place)
        return self._hosts.sub(lambda m: self._place[m[0]], text) if self._hosts and named else text
