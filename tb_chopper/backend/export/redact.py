"""Host names and paths out of what leaves the machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# A path from the root (or a drive) with at least one folder, where a word may begin; `//` of a URL goes with it.
_PATH = re.compile(r"(?<![\w.)\]}])(?:[A-Za-z]:)?(?:[/\\]{1,2}[\w.+@~-]+)+(?=[/\\])[/\\]{1,2}")
_HOST_KEYS = re.compile(rb'("(?:host_?name|host)"\s*:\s*)"(?:[^"\\]|\\.)*"', re.IGNORECASE)


class Redactor:
    """Replaces every given host name by `host0`, `host1`, ... and leaves of a path only its last name."""

    def __init__(self, hosts: Iterable[str]) -> None:
        names = sorted({h for h in hosts if h}, key=lambda h: (-len(h), h))
        # A short name (node0) stands inside the long one (node0.cluster) and in worker names (node0_r0_4711).
        self._place = {name: f"host{i}" for i, name in enumerate(sorted(names))}
        alternatives = "|".join(map(re.escape, names))
        self._hosts = re.compile(rf"(?<![A-Za-z0-9])(?:{alternatives})(?![A-Za-z0-9])") if names else None

    def text(self, text: str) -> str:
        """One text."""
        text = _PATH.sub("", text)
        return self._hosts.sub(lambda m: self._place[m[0]], text) if self._hosts else text

    def json(self, text: bytes) -> bytes:
        """A piece of JSON text; the value of a key that names a host goes, whatever it is."""
        return _HOST_KEYS.sub(rb'\1"redacted"', self.text(text.decode()).encode())

    def tree(self, value: Any) -> Any:
        """Every string of nested dicts and lists, keys left as they are."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.tree(v) for key, v in value.items()}
        return [self.tree(v) for v in value] if isinstance(value, list | tuple) else value
