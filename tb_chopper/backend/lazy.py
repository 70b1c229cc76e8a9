"""A property that is computed on first use and kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

T = TypeVar("T")

if TYPE_CHECKING or sys.version_info >= (3, 12):
    lazy = cached_property
else:

    class lazy(Generic[T]):
        """`functools.cached_property` without its lock: before Python 3.12 that one lock serves all instances, so
        that reading one run would keep every other waiting. Two threads at once may both compute; one result stays.
        """

        def __init__(self, compute: Callable[[Any], T]) -> None:
            self._compute = compute
            self._name = compute.__name__
            self.__doc__ = compute.__doc__

        @overload
        def __get__(self, instance: None, owner: type) -> lazy[T]: ...
        @overload
        def __get__(self, instance: object, owner: type) -> T: ...
        def __get__(self, instance: object | None, owner: type) -> lazy[T] | T:
            if instance is None:
                return self
            return instance.__dict__.setdefault(self._name, self._compute(instance))
