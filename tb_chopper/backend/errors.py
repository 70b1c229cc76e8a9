"""The errors that reach a user: one clear line each."""

from __future__ import annotations


class ChopperError(Exception):
    """Base of every error with a message made for a person."""


class UnreadableFile(ChopperError):
    """A file of which nothing can be used. The message names file, place and remedy."""


class NotFound(ChopperError):
    """A run, worker, view or path that does not exist."""


class InvalidSelection(ChopperError):
    """A `by` or `where` that names no column, or a value of the wrong type."""


class Unwritable(ChopperError):
    """A file that cannot be written where it was asked for."""
