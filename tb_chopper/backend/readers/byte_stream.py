"""Bytes of a file, local or behind an fsspec URL, decompressed where its content (not its name) says gzip."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from tb_chopper.backend.errors import UnreadableFile

BLOCK_BYTES = 1 << 20
GZIP = b"\x1f\x8b"


def is_url(path: str | Path) -> bool:
    return "://" in str(path)


def open_binary(path: str | Path) -> AbstractContextManager[BinaryIO]:
    """The file's raw bytes; a URL (`s3://…`) goes through fsspec. Raises UnreadableFile, in one line."""
    try:
        if not is_url(path):
            return Path(path).open("rb")
        import fsspec

        opened: AbstractContextManager[BinaryIO] = fsspec.open(str(path), "rb").open()
        return opened
    except ImportError as error:
        raise UnreadableFile(f"{path}: reading a URL needs {error.name}; install tb-chopper[remote]") from error
    except FileNotFoundError as error:
        raise UnreadableFile(f"{path}: no such file (was the run removed?)") from error
    except PermissionError as error:
        raise UnreadableFile(f"{path}: no permission to read it; give this user read access") from error
    except IsADirectoryError as error:
        raise UnreadableFile(f"{path}: is a directory, not a trace file") from error
    except OSError as error:
        raise UnreadableFile(f"{path}: cannot be read: {error.strerror or error}") from error


class Decompressed:
    """An iterator over blocks of decompressed bytes.

    `cut` tells, once it is exhausted, whether a gzip member ended too early or was corrupt; `read_bytes` how many
    bytes of the file have been consumed.
    """

    def __init__(self, file: BinaryIO, block_bytes: int = BLOCK_BYTES) -> None:
        self.cut = ""
        self.read_bytes = 0
        self._file = file
        self._block_bytes = block_bytes

    def _read(self) -> bytes:
        block = self._file.read(self._block_bytes)
        self.read_bytes += len(block)
        return block

    def __iter__(self) -> Iterator[bytes]:
        block = self._read()
        # Two bytes decide; a pipe or a remote file may give fewer at first.
        while 0 < len(block) < len(GZIP) and (more := self._read()):
            block += more
        return self._gzip(block) if block.startswith(GZIP) else self._plain(block)

    def _plain(self, block: bytes) -> Iterator[bytes]:
        while block:
            yield block
            block = self._read()

    def _gzip(self, block: bytes) -> Iterator[bytes]:
        """All members: files are appended to one another, and a single decompressor stops silently after the first."""
        member = zlib.decompressobj(31)
        while block:
            try:
                out = member.decompress(block, 2 * self._block_bytes)
            except zlib.error as error:
                self.cut = f"corrupt gzip data ({error})"
                return
            if out:
                yield out
            if member.eof:
                block = member.unused_data.lstrip(b"\0") or self._read()
                if block and not block.startswith(GZIP[: len(block)]):
                    self.cut = "something that is no gzip data follows the compressed trace"
                    return
                member = zlib.decompressobj(31) if block else member
            else:
                block = member.unconsumed_tail or self._read()
        if not member.eof:
            self.cut = "the gzip data ends too early"


Progress = Callable[[float, str], Any]
"""Called with the share of the file read so far (0 to 1) and a short text."""
