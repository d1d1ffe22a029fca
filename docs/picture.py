"""Makes docs/img/report.png, the page of one run as a picture: python docs/picture.py [FILE.png]

Simulates what README shows, with --html, and has Chromium draw the page, down to where its tables of engines begin.
Needs the dev extra, and Chromium or Chrome; without one it says so, makes nothing, and ends with 1. How letters look
depends on the fonts of the machine, so no test compares the picture.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from PIL import Image, ImageChops

ROOT = Path(__file__).resolve().parents[1]
SCENARIO = ROOT / "examples/conversation.toml"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTH, TALLEST = 880, 8000
MARGIN = 12
COLOURS = 256
"""Of a page with a few flat colours these are enough, and the file is a third as large."""


def drawn(page: Path, to: Path, browser: str) -> None:
    """The page in light colours, as tall as it may be."""
    command = [
        browser,
        "--headless",
        "--disable-gpu",
        "--hide-scrollbars",
        "--blink-settings=preferredColorScheme=1",
        f"--window-size={WIDTH},{TALLEST}",
        f"--user-data-dir={page.parent / 'browser'}",
        f"--screenshot={to}",
        page.as_uri(),
    ]
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")  # Chromium refuses to start as root with one; the page is our own
    ran = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=120)
    if not to.is_file():
        sys.exit(f"{browser} has drawn nothing:\n{ran.stderr}")


def trimmed(picture: Image.Image) -> Image.Image:
    """Without the empty ground below."""
    flat = picture.convert("RGB")
    ground = Image.new("RGB", flat.size, flat.getpixel((0, flat.height - 1)))
    box = ImageChops.difference(flat, ground).getbbox()
    assert box is not None, "nothing stands on the page"
    return flat.crop((0, 0, flat.width, min(flat.height, box[3] + MARGIN)))


def main() -> None:
    to = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/img/report.png"
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no picture is made: it takes a browser, one of {', '.join(BROWSERS)} on the PATH")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = [sys.executable, "-m", "pdflow", "simulate", str(SCENARIO), "--html", "--quiet", "--out", str(folder)]
        subprocess.run(run, cwd=ROOT, check=True)
        page = folder / "report.html"
        page.write_text(page.read_text(encoding="utf-8").partition("<h2>Engines</h2>")[0], encoding="utf-8")
        drawn(page, folder / "page.png", browser)
        with Image.open(folder / "page.png") as picture:
            small = trimmed(picture).quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(to, optimize=True)
    click.echo(f"{to}: {small.width} x {small.height}, {to.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
