"""A page as Chromium has it after running its scripts, at a width."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path

CHROMIUM = shutil.which("chromium")
# Headless Chromium has no windows below some 500 pixels: the page is looked at through a frame of the wanted width.
FRAME = """<!doctype html><body style="margin:0">
<iframe id="f" src="{page}" style="width:{width}px;height:2000px;border:0"></iframe><pre id="seen"></pre><script>
setTimeout(() => {{
  const window_ = document.getElementById('f').contentWindow, page = window_.document;
  const texts = [...page.querySelectorAll('main p, main td, main th, main figcaption, svg text')]
    .filter(node => node.textContent.trim());
  const plots = [...page.querySelectorAll('.plot')];
  document.getElementById('seen').textContent = JSON.stringify({{
    width: window_.innerWidth,
    overflow: page.documentElement.scrollWidth,
    drawn: page.querySelectorAll('.plot > .plot-container').length,
    smallest: Math.min(...texts.map(node => parseFloat(window_.getComputedStyle(node).fontSize))),
    narrowest: Math.min(...plots.map(plot => plot.getBoundingClientRect().width)),
  }});
}}, 3000);
</script></body>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a reader gets; lengths in CSS pixels."""

    width: int
    overflow: int  # of the page's content; more than ``width``: it scrolls sideways
    drawn: int  # plots
    smallest: float  # font
    narrowest: float  # plot
    errors: list[str]  # on the console


def browse(page: Path, scratch: Path, width: int) -> Seen:
    """Open a page and wait until its plots are drawn."""
    frame = scratch / "frame.html"
    frame.write_text(FRAME.format(page=page.as_uri(), width=width))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", "--virtual-time-budget=20000"]
    flags += ["--allow-file-access-from-files", "--enable-logging=stderr", "--window-size=1400,2200"]
    command = [str(CHROMIUM), *flags, f"--user-data-dir={scratch / 'profile'}", "--dump-dom", frame.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="seen">(.*?)</pre>', result.stdout, re.DOTALL)
    assert found, result.stderr[-2000:]
    errors = [line for line in result.stderr.splitlines() if "CONSOLE" in line and re.search("rror|refused", line)]
    return Seen(**json.loads(unescape(found[1])), errors=errors)
