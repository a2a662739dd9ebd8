"""A headless browser, where the machine has one, to look at pages with."""

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = (
    "chromium",
    "chromium-browser",
    "chromium-headless-shell",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
WRAPPER = """<!doctype html><body><iframe id="frame" width="{width}" height="800"
style="border:0" srcdoc="{page}"></iframe><script>
document.getElementById("frame").onload = function () {{
  const page = this.contentWindow, seen = {{}};
  const look = (function (page) {{ {script} }});
  setTimeout(function () {{
    Object.assign(seen, look(page));
    document.body.dataset.seen = JSON.stringify(seen);
  }}, 200);
}};
</script></body>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a browser made of a page."""

    console: list[str]
    """Lines of its console."""
    result: dict[str, Any]
    """What the script returned."""


def browser() -> str | None:
    """Path of a Chromium; ``CHROMIUM`` in the environment goes first."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


def look(program: str, page: str, width: int, script: str, folder: Path) -> Seen:
    """Load a page in a frame of that width; ``script`` gets its window and returns an object."""
    wrapper = folder / "wrapper.html"
    text = WRAPPER.format(width=width, page=html.escape(page), script=script)
    wrapper.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--virtual-time-budget=4000",
            f"--user-data-dir={folder / 'profile'}",
            "--dump-dom",
            wrapper.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    return Seen(
        console=[line for line in done.stderr.splitlines() if "CONSOLE" in line],
        result=json.loads(html.unescape(found.group(1))),
    )
