"""Chopper: where the GPU time of a training goes and why the hardware runs below its peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

__version__ = "0.1.0"
__all__ = ["Run", "open_run"]


def __getattr__(name: str) -> object:
    # Lazy, so that TensorBoard's start pays for nothing but this file.
    if name in __all__:
        from tb_chopper.backend import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
