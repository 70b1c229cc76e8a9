"""TensorBoard glue: one short function per route. Nothing heavy is imported before a request needs it.

An exception while this module is imported would end TensorBoard itself, and its import time is TensorBoard's.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable
from typing import Any

from tensorboard import errors
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers
from werkzeug.wsgi import wrap_file

from tb_chopper.run_store import Listed, Report, RunStore, as_state, split_logdir
from tb_chopper.trace_files import TraceFiles

LOG = logging.getLogger(__name__)

FRONTEND = os.path.realpath(os.path.join(os.path.dirname(__file__), "frontend"))
CONTENT_TYPES = {  # not `mimetypes`: that depends on the host, and browsers refuse modules of another type
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
STATIC_NAME = re.compile(r"[\w-]+(\.[\w-]+)+")
JSON = "application/json"
YEAR_S = 31_536_000
WAIT_S = 1.0
"""A view that takes longer is answered with its progress."""


class ChopperPlugin(base_plugin.TBPlugin):
    """The CHOPPER tab."""

    plugin_name = "chopper"

    def __init__(self, context: base_plugin.TBContext) -> None:
        spec = getattr(context.flags, "logdir_spec", "") or ""
        self._store = RunStore(split_logdir(context.logdir or "", spec))
        self._store.listing()  # the first scan runs while TensorBoard starts
        self._traces = TraceFiles()
        self._patience_s = 1.0

    def is_active(self) -> bool:
        """Whether the last scan found a run. Never looks at the disk: TensorBoard asks often, and waits. Only the
        first time a moment is left to the first scan, or the tab would be missing from the first page."""
        patience_s, self._patience_s = self._patience_s, 0.0
        return bool(self._store.listing(patience_s).runs)

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        return base_plugin.FrontendMetadata(es_module_path="/static/index.js", tab_name="Chopper", disable_reload=True)

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        return {
            "/static/*": _route(self._static),
            "/plotly.min.js": _route(self._plotly),
            "/config": _route(self._config),
            "/runs": _route(self._runs),
            "/selectors": _route(self._selectors),
            "/view": _route(self._view),
            "/trace": _route(self._trace),
            "/trace_file": _route(self._trace_file),
            "/perfetto/*": _route(self._perfetto),
        }

    # ---- routes --------------------------------------------------------------------------------------------------

    def _static(self, request: wrappers.Request) -> wrappers.Response:
        relative = request.path.partition("/static/")[2]
        if not STATIC_NAME.fullmatch(relative):
            raise errors.NotFoundError("no such file")
        path = os.path.realpath(os.path.join(FRONTEND, relative))
        content_type = CONTENT_TYPES.get(os.path.splitext(path)[1])
        if not path.startswith(FRONTEND + os.sep) or content_type is None or not os.path.isfile(path):
            raise errors.NotFoundError("no such file")
        with open(path, "rb") as file:
            return http_util.Respond(request, file.read(), content_type)

    def _plotly(self, request: wrappers.Request) -> wrappers.Response:
        from importlib import resources

        script = (resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes()
        return http_util.Respond(request, script, "text/javascript", expires=YEAR_S)

    def _config(self, request: wrappers.Request) -> wrappers.Response:
        from importlib.metadata import version

        from tb_chopper import __version__, perfetto_ui
        from tb_chopper.backend.views import REGISTRY
        from tb_chopper.backend.views.palette import COLORS, LABELS

        config = {
            "version": __version__,
            "views": [v._asdict() for v in REGISTRY.values()],
            "colors": COLORS,
            "labels": LABELS,
            "plotly": f"plotly.min.js?v={version('plotly')}",
            "perfetto": f"perfetto/{perfetto_ui.version()}/index.html" if perfetto_ui.version() else None,
        }
        return http_util.Respond(request, config, JSON)

    def _runs(self, request: wrappers.Request) -> wrappers.Response:
        if "rescan" in request.args:
            self._store.rescan()
        listing = self._store.listing(wait_s=WAIT_S)
        runs = [
            {
                "name": r.name,
                "signature": r.signature,
                "n_files": r.n_files,
                "bytes": r.bytes,
                "modified_s": r.modified_s,
            }
            for r in listing.runs.values()
        ]
        answer = {"generation": listing.generation, "runs": runs, "error": listing.error}
        return http_util.Respond(request, answer, JSON)

    def _selectors(self, request: wrappers.Request) -> wrappers.Response:
        from tb_chopper.backend.views.selectors import selectors

        return self._answer(request, ("selectors",), [self._listed(request, "run")], lambda _, run: selectors(run))

    def _view(self, request: wrappers.Request) -> wrappers.Response:
        from tb_chopper.backend import views

        name = request.args.get("view", "")
        if name not in views.REGISTRY:
            raise errors.NotFoundError(f"no view of that name; there are {', '.join(views.REGISTRY)}")
        options = views.REGISTRY[name].options
        selection = _selection(request) | {o: request.args[o] for o in options if request.args.get(o)}
        listed = [self._listed(request, "run")]
        if request.args.get("compare"):
            listed.append(self._listed(request, "compare"))

        def compute(_: Report, run: Any, compare: Any = None) -> Any:
            return views.build(name, run, compare=compare, **selection).as_dict()

        return self._answer(request, ("view", name, repr(selection)), listed, compute)

    def _trace(self, request: wrappers.Request) -> wrappers.Response:
        """Writes the augmented trace of the selection; answers where it is and which part of it is meant."""
        from tb_chopper.backend.export import chrome, selected
        from tb_chopper.backend.views.view import Selection

        selection, at = Selection.of(**_selection(request)), request.args.get("at")
        listed = self._listed(request, "run")

        def compute(report: Report, run: Any) -> Any:
            place = selected.place(run, selection, at)
            source = place.capture.file.path.name

            def write(path: Any) -> None:
                chrome.export(run, place.capture, path, progress=report)

            path = self._traces.written(listed.name, listed.signature, source, write)
            return {
                "file": path.name,
                "name": chrome.file_name(source),
                "source": source,
                "bytes": path.stat().st_size,
                "where": place.where,
                # As text: JavaScript's numbers do not hold every ns.
                "start_ns": None if place.start_ns is None else str(place.start_ns),
                "end_ns": None if place.end_ns is None else str(place.end_ns),
                "kernel": place.name,
            }

        return self._answer(request, ("trace", repr(selection), repr(at)), [listed], compute, keep=False)

    def _trace_file(self, request: wrappers.Request) -> wrappers.Response:
        path = self._traces.find(request.args.get("file", ""))
        if path is None:
            raise errors.NotFoundError("this trace is no longer here; open the Trace tab again")
        file = path.open("rb")
        response: wrappers.Response = http_util.Respond(request, b"", "application/gzip")
        response.headers["Content-Length"] = str(os.fstat(file.fileno()).st_size)
        response.response = wrap_file(request.environ, file, 1 << 20)  # sent piece by piece: it may be large
        response.direct_passthrough = True
        return response

    def _perfetto(self, request: wrappers.Request) -> wrappers.Response:
        """A file of Perfetto's UI. Its version is in the path, so that browsers may keep it."""
        from tb_chopper import perfetto_ui

        version, _, relative = request.path.partition("/perfetto/")[2].partition("/")
        file = perfetto_ui.read(relative) if version and version == perfetto_ui.version() else None
        if file is None:
            raise errors.NotFoundError("no such file")
        return http_util.Respond(
            request, file.content, file.content_type, expires=YEAR_S, csp_scripts_sha256s=list(file.script_sha256s)
        )

    # ---- what the routes share -----------------------------------------------------------------------------------

    def _listed(self, request: wrappers.Request, argument: str) -> Listed:
        """The run that an argument names. Names are looked up, never made into paths."""
        listing = self._store.listing(wait_s=WAIT_S)
        name = request.args.get(argument, "")
        if name not in listing.runs:
            raise errors.NotFoundError(f"{argument} {name[:200]!r} is not in the log directory (any more)")
        return listing.runs[name]

    def _answer(
        self,
        request: wrappers.Request,
        key: tuple[str, ...],
        listed: list[Listed],
        compute: Callable[..., Any],
        keep: bool = True,
    ) -> wrappers.Response:
        """The result of a computation, or how far it is."""
        started = time.monotonic()

        def as_text(report: Report, *runs: Any) -> str:
            value = json.dumps(compute(report, *runs), allow_nan=False)
            return f'{{"state": "ready", "signature": {json.dumps(listed[0].signature)}, "value": {value}}}'

        try:
            answer = self._store.ask(key, listed, as_text, WAIT_S, keep)
        finally:
            LOG.debug("%s took %.3f s", key, time.monotonic() - started)
        return http_util.Respond(request, answer if isinstance(answer, str) else as_state(answer), JSON)


class _ViewFailed(errors.PublicError):
    """A fault of ours: TensorBoard's log has the traceback, the page one line."""

    http_code = 500


def _route(handler: Callable[[wrappers.Request], wrappers.Response]) -> Callable[..., Any]:
    """`handler` as a WSGI application whose errors reach the page as one line of text."""

    def safe(request: wrappers.Request) -> wrappers.Response:
        if request.method not in ("GET", "HEAD"):
            raise errors.InvalidArgumentError("only GET is served here")
        try:
            return handler(request)
        except errors.PublicError:
            raise
        except Exception as error:
            raise _public(error) from error

    return wrappers.Request.application(safe)


def _public(error: Exception) -> errors.PublicError:
    from tb_chopper.backend.errors import ChopperError, InvalidSelection

    line = " ".join(str(error).split())[:1000]
    if isinstance(error, InvalidSelection):
        return errors.InvalidArgumentError(line)
    if isinstance(error, ChopperError | FileNotFoundError):
        return errors.NotFoundError(line)
    LOG.exception("Chopper failed")
    return _ViewFailed(f"{type(error).__name__}: {line} (the traceback is in TensorBoard's log)")


def _selection(request: wrappers.Request) -> dict[str, Any]:
    """The arguments of a view as keywords of `Selection.of`."""
    args = request.args
    selection: dict[str, Any] = {}
    if text := args.get("gpus"):
        selection["gpu"] = [_integer(t, "gpus") for t in text.split(",")]
    if text := args.get("steps"):
        first, _, last = text.partition("-")
        low, high = _integer(first, "steps"), _integer(last or first, "steps")
        if low > high:
            raise errors.InvalidArgumentError(f"steps={text[:100]!r}: the first step comes after the last")
        selection["step"] = (low, high)
    if text := args.get("span"):
        selection["span"] = _integer(text, "span")
    if text := args.get("by"):
        selection["by"] = tuple(text.split(","))
    return selection | {name: args[name] for name in ("worker", "focus") if args.get(name)}


def _integer(text: str, argument: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise errors.InvalidArgumentError(f"{argument}: {text[:100]!r} is not a whole number") from None
