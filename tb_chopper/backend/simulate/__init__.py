"""A simulated node with planted truth: real file formats for tests and the demo.

`simulate(out_dir, Options(preset="tiny"))` writes a run: Kineto traces, sidecars, telemetry, counter passes, and the
right answers in `truth/`.
"""

from tb_chopper.backend.simulate.options import Options, configs
from tb_chopper.backend.simulate.run import simulate

__all__ = ["Options", "configs", "simulate"]
