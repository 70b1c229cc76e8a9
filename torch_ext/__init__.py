"""What runs inside the training: `chopper_trace_handler` and `annotate`.

Importing the package does not import torch; asking for either function does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ext.annotation import annotate as annotate
    from torch_ext.handler import chopper_trace_handler as chopper_trace_handler

__all__ = ["annotate", "chopper_trace_handler"]


def __getattr__(name: str) -> Any:
    if name == "annotate":
        from torch_ext.annotation import annotate

        return annotate
    if name == "chopper_trace_handler":
        from torch_ext.handler import chopper_trace_handler

        return chopper_trace_handler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
