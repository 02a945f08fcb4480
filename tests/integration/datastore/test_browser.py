"""The status page in a real browser (Debian's chromium, without a window): what it draws, on light and on dark."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datastore_service.protocol.types import Namespace
from datastore_service.server.history import SAMPLE_SECONDS, History
from sglang_patches.launch.system import lacking
from tests.unit.server.service import running, serving
from tests.unit.server.test_status_page import HOSTILE, Clock, decode

CHROMIUM = shutil.which("chromium")
WIDTH, HEIGHT = 1200, 1000
LIGHT, DARK = (255, 255, 255), (22, 22, 22)
SESSION_LINE = {LIGHT: (168, 80, 0), DARK: (240, 160, 75)}  # of the page's style sheet

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=lacking("chromium"))


@pytest.fixture(scope="module")
def url():
    """A namespace that has decoded for a while, and one whose name is a script."""
    clock = Clock()
    with running() as service:
        service.page._history = history = History(service.namespaces, clock)
        for number in range(30):
            decode(service, "", number)
            history.tick()
            clock.now += SAMPLE_SECONDS
        service.namespaces.open(Namespace(HOSTILE, "t"))
        with serving(service) as url:
            yield url


def chromium(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ]
    command += [
        f"--user-data-dir={folder}/profile",
        f"--window-size={WIDTH},{HEIGHT}",
        "--enable-logging=stderr",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def screenshot(url: str, folder: Path, *words: str) -> np.ndarray:
    """uint8 [HEIGHT, WIDTH, 3]."""
    chromium(folder, f"--screenshot={folder}/page.png", *words, url)
    pixels = np.asarray(Image.open(folder / "page.png").convert("RGB"))
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    return pixels


def places(pixels: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """bool [HEIGHT, WIDTH]: where that colour is, but for antialiasing."""
    return (np.abs(pixels.astype(int) - colour) < 40).all(axis=2)


@pytest.mark.parametrize(
    ("page", "words"), [(LIGHT, ()), (DARK, ("--blink-settings=preferredColorScheme=0",))]
)
def test_draws_text_and_charts(url, tmp_path, page, words):
    pixels = screenshot(url, tmp_path, *words)
    assert tuple(pixels[2, 2]) == page
    ink = places(pixels, tuple(255 - channel for channel in page))
    assert ink[:80].sum() > 200, "the heading"
    drawn = places(pixels, SESSION_LINE[page])
    line = np.flatnonzero(
        drawn[:, 450 : WIDTH // 2].any(axis=0)
    )  # of the charts on the left, their last quarter hour
    assert len(line) > 40, "a dotted line over ten minutes of an hour"
    assert 60 < np.ptp(line) < 120


def test_runs_nothing_and_complains_of_nothing(url, tmp_path):
    done = chromium(tmp_path, "--dump-dom", url)
    assert '<h2 id="namespace-2">&lt;script&gt;alert' in done.stdout
    assert "<script>" not in done.stdout
    assert "CONSOLE" not in done.stderr, "a refused style, a missing file"
