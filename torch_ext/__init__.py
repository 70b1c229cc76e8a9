"""What runs inside the training: `chopper_trace_handler`, `annotate`, `annotate_pipeline` and `telemetry`.

Importing the package does not import torch; asking for one of the first three does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ext.annotation import annotate as annotate
    from torch_ext.handler import chopper_trace_handler as chopper_trace_handler
    from torch_ext.pipeline import annotate_pipeline as annotate_pipeline
    from torch_ext.sampling import start_telemetry as start_telemetry
    from torch_ext.sampling import telemetry as telemetry

__all__ = ["annotate", "annotate_pipeline", "chopper_trace_handler", "start_telemetry", "telemetry"]


def __getattr__(name: str) -> Any:
    if name == "annotate":
        from torch_ext.annotation import annotate

        return annotate
    if name == "annotate_pipeline":
        from torch_ext.pipeline import annotate_pipeline

        return annotate_pipeline
    if name == "chopper_trace_handler":
        from torch_ext.handler import chopper_trace_handler

        return chopper_trace_handler
    if name in ("start_telemetry", "telemetry"):
        from torch_ext import sampling

        return getattr(sampling, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
