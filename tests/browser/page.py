"""TensorBoard as a process of its own, and one page with the Chopper tab open: what every browser test works with."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

CHROMIUM = next(
    (p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome") if os.path.exists(p)), ""
)
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic", "--no-first-run",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

ALONE = """
import sys
from tensorboard import default, program
from tb_chopper.plugin import ChopperPlugin
server = program.TensorBoard(plugins=[*default.get_static_plugins(), ChopperPlugin])
server.configure(sys.argv)
server.main()
"""
"""TensorBoard without other installed plugins, which read all runs at its start and keep the machine busy."""


class TensorBoard:
    def __init__(self, folder: Path, alone: bool = True) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        program = ["-c", ALONE] if alone else ["-m", "tensorboard.main"]
        command = [sys.executable, *program, "--logdir", str(folder), "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.wait_for("/data/plugin/chopper/runs", lambda text: bool(json.loads(text)["runs"]))

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # a plugin that is still reading holds it
            self.process.kill()
            self.process.wait()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as reply:
            return str(reply.read().decode())

    def wait_for(self, path: str, good: Callable[[str], bool], seconds: float = 90) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if good(text := self.get(path)):
                    return text
            except OSError:
                pass
            time.sleep(0.3)
        raise AssertionError(f"{path} never became what it should")


class Tab:
    """One page with the Chopper tab open; notes what the console and the network say."""

    def __init__(self, browser: Any, server: TensorBoard, theme: str = "light", width: int = 1280) -> None:
        self.server, self.complaints = server, list[str]()
        self.context = browser.new_context(viewport={"width": width, "height": 900}, accept_downloads=True)
        settings = json.dumps(json.dumps({"theme": theme}))
        self.context.add_init_script(f"localStorage.setItem('_tb_global_settings', {settings})")
        self.page = self.context.new_page()
        self.page.on("console", lambda m: m.type == "error" and self.complaints.append(f"console: {m.text}"))
        self.page.on("pageerror", lambda e: self.complaints.append(f"exception: {e}"))
        self.page.on("request", self._note_request)

    def _note_request(self, request: Any) -> None:
        if not request.url.startswith((self.server.url, "data:", "blob:")):
            self.complaints.append(f"request off the machine: {request.url}")

    def open(self, **state: str) -> Any:
        """The tab's frame, once the view is there."""
        link = "".join(f"&p.chopper.{key}={quote(value, safe='')}" for key, value in state.items())
        self.page.goto(f"{self.server.url}/#chopper{link}")
        return self.frame(state.get("view"), state.get("run"))

    def frame(self, view: str | None = None, run: str | None = None) -> Any:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for frame in self.page.frames:
                if "plugin_entry.html?name=chopper" in frame.url:
                    found = frame.query_selector("main[data-ready=yes]:not([aria-busy])")
                    shown = found and (found.get_attribute("data-view"), found.get_attribute("data-run"))
                    if shown and view in (None, shown[0]) and run in (None, shown[1]):
                        return frame
            self.page.wait_for_timeout(50)
        raise AssertionError(f"view {view!r} of {run!r} did not appear")

    def number(self, label: str) -> float:
        return float(self.frame().get_attribute(f"dd[data-label='{label}']", "data-value"))


def table_rows(tab: Tab, name: str) -> list[dict[str, str]]:
    """The rows of a table as its CSV has them: keys without the unit."""
    with tab.page.expect_download() as waiting:
        tab.frame().click(f"[data-table={name}] button:text-is('CSV')")
    assert waiting.value.suggested_filename.endswith(f"_{name}.csv")
    with open(waiting.value.path(), encoding="utf-8", newline="") as file:
        return [{k.split(" [")[0]: v for k, v in row.items()} for row in csv.DictReader(file)]


CONTRAST = """() => {
  const channel = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number);
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  };
  const back = (element) => {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor;
      if (!/, 0\\)$|transparent/.test(color)) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const kinds = [".headline", ".muted", ".term", "td", "h3", ".tabs button"];
  const ratios = kinds.flatMap((k) => [...document.querySelectorAll(k)].slice(0, 3)).map((element) => {
    const [a, b] = [light(getComputedStyle(element).color), light(back(element))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  });
  return Math.min(...ratios);
}"""
"""The lowest contrast of text against its background (WCAG's formula)."""
