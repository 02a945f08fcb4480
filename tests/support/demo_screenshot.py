"""`python -m tests.support.demo_screenshot URL FILE.png`: asks a running `make demo` its first two samples and the second one again, and
shows the page then."""

import sys
import tempfile
from pathlib import Path

from tests.support.browser import CHROMIUM, Page, browsing

ANSWERS_SECONDS = 300.0
IDLE = "!document.getElementById('ask').disabled"


def ask(page: Page, button: str, rounds: int) -> None:
    """Returns when so many questions have been answered."""
    page.click(button)
    error = "!document.getElementById('error').hidden"
    answered = f"document.querySelectorAll('#rounds tr').length === {rounds} && {IDLE}"
    page.wait_for(f"{error} || {answered}", ANSWERS_SECONDS)
    if page.evaluate(error):
        sys.exit(f"the page says: {page.text('#error')}")


def main() -> None:
    url, file = sys.argv[1:]
    if CHROMIUM is None:
        sys.exit("no chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile, browsing(Path(profile)) as page:
        page.open(url)
        page.wait_for(IDLE)
        for rounds, sample in enumerate((1, 2), 1):
            page.click(f"#samples li:nth-child({sample}) button")
            ask(page, "#ask", rounds)
        ask(page, "#again", 3)
        page.evaluate("document.activeElement.blur()")
        page.screenshot(Path(file), "#result", "#method")


if __name__ == "__main__":
    main()
