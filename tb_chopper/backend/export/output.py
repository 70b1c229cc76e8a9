"""Files that are there whole or not at all."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tb_chopper.backend.errors import Unwritable

LEVEL = 3
"""Of gzip: 6 is three times as slow for 10 % less."""


@contextmanager
def open_atomic(path: Path, *, never: Path | None = None) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of `path` when the block ends well; gzipped where the name ends in `.gz`.

    `never`: the source, which is not written over. Raises Unwritable, in one line.
    """
    if never is not None and path.exists() and never.exists() and path.samefile(never):
        raise Unwritable(f"{path} is the source itself; choose another name with -o")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=LEVEL, mtime=0) as packed:
                    yield packed  # type: ignore[misc]  # a GzipFile writes like any binary file
            else:
                yield raw
        os.replace(temporary, path)
    except OSError as error:
        raise Unwritable(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
