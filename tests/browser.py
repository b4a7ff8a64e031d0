"""Pages in headless Chromium: how their tables lie in windows of several widths, in light and in dark.

Chromium's own window cannot be narrower than 500 pixels, so pages are shown in frames of one page, which a server on
this machine sends: a frame has media queries of its own, and pages of one server may look into each other.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (375, 800, 1400)

_OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
_OPTIONS += ["--hide-scrollbars", "--window-size=1500,1200"]

# Shows every page at every width and notes, for each table, whether all of it can be seen: it fits, or an element
# around it scrolls and shows so by a shade on its edge; a figure that scrolls fades there. Scroll bars are no hint:
# many devices hide them.
_MEASURE = """<!doctype html><title>measure</title><body><script>
const pages = PAGES, widths = WIDTHS, found = [];
function look(frame, page, width) {
  const root = frame.contentDocument.documentElement;
  const result = {page, width, window: frame.contentWindow.innerWidth, content: root.scrollWidth, tables: []};
  for (const folded of frame.contentDocument.querySelectorAll("details")) folded.open = true;
  for (const table of frame.contentDocument.querySelectorAll("table")) {
    let how = "fits";
    for (let box = table; box !== frame.contentDocument.body; box = box.parentElement) {
      if (box.scrollWidth <= box.clientWidth + 1) continue;
      const style = frame.contentWindow.getComputedStyle(box);
      if (style.overflowX === "visible") continue;
      how = ["auto", "scroll"].includes(style.overflowX) && style.backgroundImage !== "none" ? "scrolls" : "is cut off";
      break;
    }
    result.tables.push(how);
  }
  for (const figure of frame.contentDocument.querySelectorAll("figure")) {
    const faded = frame.contentWindow.getComputedStyle(figure).maskImage !== "none";
    if (figure.scrollWidth > figure.clientWidth + 1) result.tables.push(faded ? "scrolls" : "is cut off");
  }
  const picture = frame.contentDocument.querySelector("figure img, article img");
  result.filter = picture ? frame.contentWindow.getComputedStyle(picture).filter : null;
  const contents = frame.contentDocument.querySelector("nav"), main = frame.contentDocument.querySelector("main");
  const [beside, text] = [contents, main].map(box => box ? box.getBoundingClientRect() : null);
  result.contents = Boolean(beside && text && beside.width && beside.right <= text.left && beside.height <= 1000);
  found.push(result);
}
(async () => {
  for (const page of pages) for (const width of widths) {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width: ${width}px; height: 1000px; border: 0`;
    frame.src = page;
    await new Promise(ready => { frame.onload = ready; document.body.append(frame); });
    await new Promise(ready => setTimeout(ready, 50));
    look(frame, page, width);
    frame.remove();
  }
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify(found);
  document.body.append(answer);
})();
</script>"""


def browser() -> str:
    """Return the path of the browser, or skip the test."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium here (Debian's package is chromium)")
    return found


def measure(folder: Path, pages: Sequence[str], profile: Path, dark: bool = False) -> list[dict[str, Any]]:
    """Return what each page looks like at each of the widths.

    Args:
        folder: Where the pages are.
        pages: Their paths within it.
        profile: A folder for the browser's own files.
        dark: Whether the user prefers dark pages.
    """
    program = browser()
    page = _MEASURE.replace("PAGES", json.dumps(list(pages))).replace("WIDTHS", json.dumps(WIDTHS))
    with _served(folder, page) as address:
        words = [*_OPTIONS, f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--user-data-dir={profile}"]
        words += ["--virtual-time-budget=600000", "--dump-dom", address]
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=300)
    answer = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert answer is not None, done.stderr
    return json.loads(html.unescape(answer[1]))


@contextmanager
def _served(folder: Path, measuring: str):
    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/measure":
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(measuring.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/measure"
    finally:
        server.shutdown()
        server.server_close()
