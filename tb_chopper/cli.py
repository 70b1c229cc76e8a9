"""Command line: tb-chopper analyze | collect | ... ; each sub-command lives with what it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tb_chopper import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 on success, 1 for what --fail-on names, 2 with one clear line on stderr otherwise."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser(argv).parse_args(argv)
    from tb_chopper.backend.errors import ChopperError

    try:
        return int(arguments.run(arguments))
    except ChopperError as error:
        print(f"tb-chopper: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tb-chopper: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (| head); closing stderr keeps Python from complaining at exit.
        sys.stderr.close()
        return 0


class Command(NamedTuple):
    """A sub-command: what it does, in a line and in full, and what adds its arguments and sets `run`."""

    help: str
    description: str
    add: Callable[[argparse.ArgumentParser], None]


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tb-chopper", description="Where the GPU time of a training goes and why.")
    parser.add_argument("--version", action="version", version=f"tb-chopper {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=command.description)
        if name in argv[:1]:  # the others' modules are not imported
            command.add(sub)
    return parser


def _add_analyze(parser: argparse.ArgumentParser) -> None:
    from tb_chopper.backend import analyze
    from tb_chopper.backend.rules import RULES

    parser.add_argument("path", metavar="PATH")
    parser.add_argument("--json", action="store_true", help="for machines; layout in docs/api.md")
    parser.add_argument("--communication", metavar="REGEX", action="append", default=[],
                        help="a further pattern of communication kernels (repeatable)")
    parser.add_argument("--fail-on", metavar="RULE", action="append", default=[], choices=analyze.FAIL_ON,
                        help="exit with 1 if the diagnosis finds this: warning, info (any), or the code of a rule "
                             f"(repeatable): {', '.join(RULES)}")
    parser.set_defaults(run=_analyze)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    from tb_chopper.backend.simulate import arguments as simulation

    simulation.add_arguments(parser)
    parser.set_defaults(run=_writes(simulation.run))


def _add_sample(parser: argparse.ArgumentParser) -> None:
    from torch_ext import sampler

    sampler.add_arguments(parser)
    parser.set_defaults(run=sampler.run)


def _add_collect(parser: argparse.ArgumentParser) -> None:
    from torch_ext import counters

    counters.add_arguments(parser)
    parser.set_defaults(run=counters.run)


def _add_export(parser: argparse.ArgumentParser) -> None:
    from tb_chopper.backend.export import arguments as exports

    exports.add_export_arguments(parser)
    parser.set_defaults(run=_writes(exports.export))


def _add_report(parser: argparse.ArgumentParser) -> None:
    from tb_chopper.backend.export import arguments as exports

    exports.add_report_arguments(parser)
    parser.set_defaults(run=_writes(lambda *given: [exports.report(*given)]))


COMMANDS = {
    "analyze": Command(
        "the numbers of every run in a directory, or of one trace file",
        "Reads every run under PATH (a log directory, a run, or one trace file) and prints its numbers.", _add_analyze),
    "collect": Command(
        "run a training again for its hardware counters",
        "Runs the command once per few counters under rocprofv3 (AMD) or Nsight Compute (NVIDIA), stops a run that "
        "hangs, keeps what was finished. Record the trace first, with the same command.", _add_collect),
    "sample": Command(
        "record clocks, power, temperature and CPU use of this host",
        "Records clocks, power, temperature and CPU use of this host until stopped (Ctrl-C).", _add_sample),
    "report": Command(
        "one page with every view of a run, to attach to a bug or a mail",
        "Writes every view of a run into one page that opens from disk without network, or as Markdown.", _add_report),
    "export": Command(
        "a run in the formats of other tools",
        "Writes a run for Perfetto, chrome://tracing and other trace viewers, or its tables for notebooks.",
        _add_export),
    "simulate": Command(
        "write the files of a simulated node, with the truth beside them",
        "Writes what the profilers would have recorded on a simulated node: traces, sidecars, telemetry, hardware "
        "counters; and the planted truth. Simulated runs say so in their name and in every view.", _add_simulate),
}


def _analyze(arguments: argparse.Namespace) -> int:
    from tb_chopper.backend import analyze

    with _Progress() as progress:
        result = analyze.analyze(arguments.path, arguments.communication, progress)
    if arguments.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        print(analyze.text(result))
    if any(run["workers"] for run in result["runs"]):
        if failed := analyze.failing(result, arguments.fail_on):
            print(f"tb-chopper: found {', '.join(failed)} (--fail-on)", file=sys.stderr)
        return 1 if failed else 0
    from tb_chopper.backend.errors import UnreadableFile

    raise UnreadableFile(analyze.why_nothing(result))


def _writes(write: Callable[[argparse.Namespace, _Progress], Iterable[Path]]) -> Callable[[argparse.Namespace], int]:
    """What a command does that writes files: it shows its progress, then prints their paths."""

    def run(arguments: argparse.Namespace) -> int:
        with _Progress() as progress:
            written = write(arguments, progress)
        for path in written:
            print(path)
        return 0

    return run


class _Progress:
    """One line on stderr, kept up to date where stderr is a terminal; silent elsewhere."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def __call__(self, share: float, text: str) -> None:
        if self.shown:
            print(f"\r\033[K{share:4.0%} {text[:100]}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *exception: object) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
