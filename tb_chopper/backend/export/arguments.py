"""The `export` and `report` sub-commands: their arguments, and what they run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from tb_chopper.backend.capture import Progress
from tb_chopper.backend.errors import NotFound, UnreadableFile
from tb_chopper.backend.export.redact import Redactor
from tb_chopper.backend.hardware import OVERRIDES, parse_override
from tb_chopper.backend.run import Run, open_run

FORMATS = ("chrome", "perfetto", "parquet", "csv")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a run, or one trace file")
    parser.add_argument("--format", choices=FORMATS, default="chrome", help=(
        "chrome: the trace with counters, clocks and attribution added; perfetto: all ranks in one .pftrace; "
        "parquet, csv: every table (default: %(default)s)"))
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help=(
        "file, or directory where there are several files to write (default: in the current directory)"))
    _add_redact(parser)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a run, or one trace file")
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help=(
        "file to write (default: report.html or report.md in the current directory)"))
    parser.add_argument("--format", choices=("html", "md"), help="default: by the name of OUT, else html")
    parser.add_argument("--compare", metavar="OTHER", help="another run, shown beside this one with the differences")
    parser.add_argument("--hardware", metavar="KEY=NUMBER,...", default="", help=(
        "peaks of GPUs that are not known or run at others: " + "; ".join(f"{k}, {v}" for k, v in OVERRIDES.items())))
    _add_redact(parser)


def _add_redact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redact", action="store_true", help="take out host names and the folders of paths")


def export(arguments: argparse.Namespace, progress: Progress) -> list[Path]:
    """Run `tb-chopper export` and return the files written."""
    run = _readable(arguments.path, progress)
    redactor = Redactor.of_runs(run) if arguments.redact else None
    if arguments.format == "chrome":
        return _chrome(run, arguments.output, redactor, progress)
    name = _name(run, redactor)
    if arguments.format == "perfetto":
        from tb_chopper.backend.export import perfetto

        path = _file(arguments.output, f"{name}.pftrace")
        perfetto.export(run, path, redactor=redactor, progress=progress)
        return [path]
    from tb_chopper.backend.export import tables

    return tables.export(run, arguments.output or Path(f"{name}.tables"), arguments.format, redactor=redactor)


def report(arguments: argparse.Namespace, progress: Progress) -> Path:
    """Run `tb-chopper report` and return the file written."""
    from tb_chopper.backend.export import report as reports

    told = parse_override(arguments.hardware)
    run = _readable(arguments.path, progress, told)
    other = _readable(arguments.compare, progress, told) if arguments.compare else None
    named = "md" if arguments.output and arguments.output.suffix.lower() == ".md" else "html"
    form = arguments.format or named
    path = _file(arguments.output, f"report.{form}")
    redactor = Redactor.of_runs(*filter(None, (run, other))) if arguments.redact else None
    reports.export(run, path, form=form, compare=other, redactor=redactor, progress=progress)
    return path


def _chrome(run: Run, output: Path | None, redactor: Redactor | None, progress: Progress) -> list[Path]:
    from tb_chopper.backend.export import chrome

    names = [chrome.file_name(redactor.text(c.file.path.name) if redactor else c.file.path.name) for c in run.captures]
    if len(names) == 1:
        targets = [_file(output, names[0])]
    elif output is not None and not output.is_dir() and output.suffix in (".json", ".gz"):
        raise NotFound(f"{run.name} holds {len(names)} traces: give a directory with -o, or PATH of one trace")
    else:
        targets = [(output or Path()) / name for name in names]
    for capture, target in zip(run.captures, targets, strict=True):
        chrome.export(run, capture, target, redactor=redactor, progress=progress)
    return targets


def _readable(path: str, progress: Progress, hardware: Mapping[str, float] | None = None) -> Run:
    run = open_run(path, hardware=hardware, progress=progress)
    if not run.captures:
        raise UnreadableFile(run.findings[0].message)
    return run


def _name(run: Run, redactor: Redactor | None) -> str:
    """What files of a run are called."""
    name = Path(run.files.path).resolve().name if run.name == "." else run.name
    name = redactor.text(name) if redactor else name
    return re.sub(r"(?:\.pt\.trace)?\.json(?:\.gz)?$", "", re.sub(r"[^\w.+-]+", "_", name)) or "run"


def _file(output: Path | None, name: str) -> Path:
    """The file asked for; `name` in a directory."""
    return Path(name) if output is None else output / name if output.is_dir() else output
