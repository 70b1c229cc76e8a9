"""What recording costs a training step: `python benchmarks/handler_cost.py [--layers 4 --rounds 5 ...]`.

One process trains the example's Llama without anything, with module scopes but no profiler, with the profiler, and
with profiler and scopes, in turns. Medians over all steps of the wall time and of the process's CPU time, which does
not see what else the machine does; on CPU with one thread the two are the same on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from torch_ext import annotate, chopper_trace_handler

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from llama import Config, Llama

VARIANTS = {  # name -> (profiler, module scopes)
    "plain": (False, False),
    "annotate": (False, True),
    "profiler": (True, False),
    "profiler + annotate": (True, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"layers": 4, "width": 256, "batch": 2, "sequence": 128, "rounds": 5, "steps": 8}
    for option, default in defaults.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = Config(layers=args.layers, width=args.width)
    model = Llama(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(config.vocabulary, (args.batch, args.sequence + 1), device=device)

    def steps(n: int) -> Iterator[tuple[float, float]]:
        for _ in range(n):
            began, began_cpu = time.perf_counter(), time.process_time()
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            yield (time.perf_counter() - began) * 1e3, (time.process_time() - began_cpu) * 1e3

    list(steps(3))
    step_ms: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    handler_ms: dict[str, list[float]] = {name: [] for name in VARIANTS}
    bytes_written: dict[str, int] = {}
    for _ in range(args.rounds):
        for name, (profiled, scoped) in VARIANTS.items():
            with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
                if scoped:
                    stack.enter_context(annotate(model))
                if not profiled:
                    step_ms[name] += steps(args.steps)
                    continue
                activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
                profiler = profile(activities=activities, record_shapes=True)
                profiler.start()
                step_ms[name] += list(steps(args.steps + 1))[1:]  # the first one pays for the start
                profiler.stop()
                handler = chopper_trace_handler(folder)
                began = time.process_time()
                handler(profiler)
                handler_ms[name].append((time.process_time() - began) * 1e3)
                bytes_written[name] = sum(path.stat().st_size for path in Path(folder).iterdir())

    n_modules = sum(1 for _ in model.modules())
    print(f"torch {torch.__version__}, {device.type}, {args.layers} layers of width {args.width}, {n_modules} modules")
    print(f"{args.rounds} rounds of {args.steps} steps; handler: CPU time per capture of {args.steps + 1} steps")
    print(f"{'variant':<22}{'wall ms':>9}{'CPU ms':>9}{'over plain':>12}{'handler ms':>12}{'kB written':>12}")
    plain = statistics.median(cpu for _, cpu in step_ms["plain"])
    for name, times in step_ms.items():
        wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        handler_cell = f"{statistics.median(handler_ms[name]):.0f}" if handler_ms[name] else "-"
        size_cell = f"{bytes_written[name] / 1e3:.0f}" if name in bytes_written else "-"
        over = f"{cpu - plain:+.2f}"
        print(f"{name:<22}{wall:>9.2f}{cpu:>9.2f}{over:>12}{handler_cell:>12}{size_cell:>12}")
    print("one module call more than plain: " + ", ".join(f"{n} {us:+.1f} us" for n, us in scope_cost_us().items()))


def scope_cost_us() -> dict[str, float]:
    """What a scope adds to the call of a module that does nothing: best of several loops, so that load hardly shows."""

    def best(module: torch.nn.Module) -> float:
        return min(timeit.repeat(lambda: module(None), number=2000, repeat=25)) / 2000 * 1e6

    module = torch.nn.Identity()
    plain = best(module)
    with annotate(module):
        idle = best(module) - plain
        with profile(activities=[ProfilerActivity.CPU]):
            recording = best(module) - plain
    return {"annotate": idle, "profiler + annotate": recording}


if __name__ == "__main__":
    main()
