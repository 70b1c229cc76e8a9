"""Real runs of the example, made on the spot; `python tests/runs/record.py FOLDER [KIND ...]` records them to keep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train.py"

KINDS: dict[str, tuple[int, list[str]]] = {
    "plain": (1, ["--no-annotate"]),
    "fsdp2": (2, ["--parallel", "fsdp2"]),
    "fsdp1": (2, ["--parallel", "fsdp1"]),
    "ddp": (2, ["--parallel", "ddp"]),
    "fsdp2+checkpoint": (2, ["--parallel", "fsdp2", "--checkpoint"]),
    "fsdp2+compile": (2, ["--parallel", "fsdp2", "--compile"]),
    "tp": (2, ["--parallel", "tp"]),
    "pp+gpipe": (4, ["--parallel", "pp", "--schedule", "gpipe", "--batch", "4", "--microbatches", "4"]),
    "pp+1f1b": (4, ["--parallel", "pp", "--schedule", "1f1b", "--batch", "8", "--microbatches", "8"]),
    "pp+interleaved": (2, ["--parallel", "pp", "--schedule", "interleaved", "--batch", "4", "--microbatches", "4"]),
    "pp+zero-bubble": (2, ["--parallel", "pp", "--schedule", "zero-bubble", "--batch", "4", "--microbatches", "4"]),
}
"""Name of a run -> processes, options of examples/train.py."""

PIPELINES = tuple(kind for kind in KINDS if kind.startswith("pp+"))

LAYERS, STEPS = 4, 2
TINY = [
    "--layers", str(LAYERS), "--width", "64", "--hidden", "176", "--heads", "4", "--kv-heads", "2",
    "--vocabulary", "256", "--batch", "2", "--sequence", "32", "--wait", "1", "--warmup", "1", "--active", str(STEPS),
    "--no-telemetry",
]  # fmt: skip


def record(kind: str, logdir: Path, *options: str, timeout_s: float = 300) -> Path:
    """Trains with the options of `kind`, then `options`, on CPU with gloo; returns `logdir` with its files in it.

    Raises RuntimeError with the end of the output if the training fails, subprocess.TimeoutExpired if it hangs.
    """
    processes, parallel = KINDS[kind]
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launcher, str(TRAIN), *TINY, *parallel, "--logdir", str(logdir), *options]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return logdir


def main() -> None:
    folder, *kinds = sys.argv[1:]
    for kind in kinds or KINDS:
        print(record(kind, Path(folder, kind)), flush=True)


if __name__ == "__main__":
    main()
