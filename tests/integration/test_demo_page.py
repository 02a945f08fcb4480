"""The page of `make demo` in a real browser (Debian's chromium, without a window), in front of two stand-ins of SGLang."""

import asyncio
import contextlib
import json
import signal

import httpx
import numpy as np
import pytest
from PIL import Image

from sglang_patches.launch.demo import page_part
from sglang_patches.launch.demo_page.answers import Server
from sglang_patches.launch.demo_page.application import QUESTION_CHARACTERS, SAMPLES, application
from sglang_patches.launch.processes import Child, free_port, wait_until
from sglang_patches.launch.serve import read_settings
from sglang_patches.launch.system import lacking
from tests.support.browser import CHROMIUM, Page, browsing
from tests.support.sglang_stand_in import END, StandIn, byte_tokenizer, serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=lacking("chromium"))

TOKENIZER = byte_tokenizer()
ANSWER = "By the sea <b>é</b>: 😀\n\n  and the end."
OUTPUT = TOKENIZER.encode(ANSWER + END).ids
NAMES = ("session", "live", "prior", "rejected", "draft_model", "target")
SOURCES = [NAMES[place % len(NAMES)] for place in range(len(OUTPUT))]
PER_STEP = 4
STEPS = -(-(len(OUTPUT) - 1) // PER_STEP)
IDLE = "!document.getElementById('ask').disabled"
DONE = f"{IDLE} && document.getElementById('result').textContent.includes('identical')"


class Held(StandIn):
    """Keeps back what has more tokens than `most`."""

    most = len(OUTPUT)

    async def _messages(self, body):
        async for message in super()._messages(body):
            while message.get("meta_info", {}).get("completion_tokens", 0) > self.most:
                await asyncio.sleep(0.01)
            yield message


@pytest.fixture(scope="module")
def stand_ins():
    plain = Held(TOKENIZER, OUTPUT)
    method = StandIn(TOKENIZER, OUTPUT, PER_STEP, SOURCES)
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(serving(s.application())) for s in (plain, method)]
        servers = Server("plain decoding", urls[0], drafts=False), Server("SSSD", urls[1], drafts=True)
        url = stack.enter_context(serving(application("/models/tiny", *servers, TOKENIZER)))
        yield plain, method, url


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(stand_ins, tab) -> Page:
    plain, method, url = stand_ins
    plain.seconds = method.seconds = 0.0
    plain.most = len(OUTPUT)
    plain.output, method.output, method.sources = OUTPUT, OUTPUT, SOURCES
    method.breaks_after, method.context = None, 4096
    tab.complaints.clear()
    tab.open(url)
    tab.wait_for(IDLE)
    return tab


def figures(page: Page, column: str) -> dict[str, str]:
    shown = page.evaluate(
        f"JSON.stringify([...document.querySelectorAll('#{column} [data-figure]')].map(e => [e.dataset.figure, e.textContent]))"
    )
    return dict(json.loads(shown))


def test_a_sample_is_answered_by_both_and_every_token_has_its_source(page, stand_ins):
    plain, method, _ = stand_ins
    plain.seconds = 0.01
    assert page.text("#model") == "tiny"
    assert [page.text(f"#{column} h2") for column in ("plain", "method")] == ["plain decoding", "SSSD"]
    page.click("#samples li:nth-child(2) button")
    page.click("#ask")
    page.wait_for(DONE)
    for stand_in in (plain, method):
        assert stand_in.asked[-1]["input_ids"] == TOKENIZER.encode(SAMPLES[1][0]).ids
    for column, tokens_a_step in (("plain", "1.00"), ("method", f"{(len(OUTPUT) - 1) / STEPS:.2f}")):
        shown = figures(page, column)
        assert shown["text"] == ANSWER, "and no markup of it"
        assert (shown["tokens"], shown["step"]) == (str(len(OUTPUT)), tokens_a_step)
        if column == "plain":  # the other takes too little time for a figure of one decimal
            assert float(shown["rate"]) == pytest.approx(len(OUTPUT) / float(shown["seconds"]), rel=0.2)
    spans = page.evaluate(
        "JSON.stringify([...document.querySelectorAll('#method .text span')].map(e => [e.className, e.title, e.textContent]))"
    )
    own = [source for token, source in zip(OUTPUT, SOURCES, strict=True) if TOKENIZER.decode([token])]
    shown = json.loads(spans)
    assert all(name == title for name, title, _ in shown)
    assert shown[1] == ["live", "live", "y"] and shown[2] == ["prior", "prior", " the"]
    assert len(shown) < len(own), "the bytes of a character are one"
    assert page.text("#result").startswith("SSSD: ")
    assert page.text("#result").endswith("identical output: yes")
    assert f"session {SOURCES.count('session')}" in figures(page, "method")["sources"]
    assert figures(page, "plain")["sources"] == f"Proposed by: target {len(OUTPUT)}."
    assert page.complaints == [], "a refused style, a missing file, an exception"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sources_differ_in_colour_and_in_line_and_can_be_read(page, scheme):
    page.prefer(scheme)
    page.click("#ask")
    page.wait_for(DONE)
    styles = {}
    for name in NAMES:
        styles[name] = page.evaluate(
            f"(() => {{ const style = getComputedStyle(document.querySelector('#method .text .{name}'));"
            "return [style.color, style.textDecorationLine + style.textDecorationStyle]; })()"
        )
    assert len({colour for colour, _ in styles.values()}) == len(NAMES)
    assert len({line for _, line in styles.values()}) == len(NAMES)
    ground = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (ground > 0.5) == (scheme == "light")
    for name, (colour, _) in styles.items():
        low, high = sorted([ground, luminance(colour)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, f"{name}: the contrast that WCAG asks for (AA)"


def luminance(colour: str) -> float:
    """Relative luminance of rgb(r, g, b), as WCAG 2 defines it."""
    channels = (
        np.array([int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]) / 255
    )
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_the_keyboard_alone_asks_and_asks_again(page, stand_ins):
    plain, method, _ = stand_ins
    before = len(method.asked)
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "question"
    page.write("Where is the end?")
    page.press("Enter")
    page.wait_for(DONE)
    assert page.evaluate("document.activeElement.id") == "question", "it keeps the focus"
    page.write("another one, which is not asked")
    while page.evaluate("document.activeElement.id") != "again":
        page.press("Tab")
    method.sources = ["live"] * len(OUTPUT)
    page.press(" ")
    page.wait_for(f"{DONE} && document.querySelectorAll('#rounds tr').length === 2")
    assert page.evaluate("document.activeElement.id") == "again"
    assert [asked["input_ids"] for asked in method.asked[before:]] == [
        TOKENIZER.encode("Where is the end?").ids
    ] * 2
    assert figures(page, "method")["sources"] == f"Proposed by: live {len(OUTPUT)}."
    rounds = page.evaluate("[...document.querySelectorAll('#rounds th')].map(e => e.textContent).join()")
    assert rounds == "Where is the end?,Where is the end?"


def test_text_and_figures_grow_one_server_after_the_other(page, stand_ins):
    plain, method, _ = stand_ins
    plain.seconds = method.seconds = 0.05
    plain.most = 10
    page.click("#ask")
    page.wait_for("document.querySelector('#plain [data-figure=tokens]').textContent === '10'")
    shown = figures(page, "plain")
    assert shown["text"] == TOKENIZER.decode(OUTPUT[:10]) and float(shown["rate"]) > 0
    assert shown["step"] == "≈ 1.00"
    assert set(figures(page, "method").values()) == {"–", ""}, "it has not been asked"
    assert page.evaluate("document.getElementById('plain').ariaBusy") == "true"
    plain.most = len(OUTPUT)
    page.wait_for(DONE)
    assert page.evaluate("document.querySelectorAll('[aria-busy]').length") == 0


def test_answers_that_differ_are_not_called_identical(page, stand_ins):
    _, method, _ = stand_ins
    method.output = [*OUTPUT[:-2], OUTPUT[0], OUTPUT[-1]]
    page.click("#ask")
    page.wait_for(DONE)
    assert page.text("#result").endswith("identical output: no")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"breaks_after": 2}, "SSSD: the server broke its answer off; `make demo` shows its log"),
        ({"context": 100}, "maximum context length of 100 tokens"),
    ],
)
def test_a_failure_is_shown_in_words_and_another_question_may_follow(page, stand_ins, change, words):
    _, method, _ = stand_ins
    vars(method).update(change)
    page.click("#ask")
    page.wait_for(f"{IDLE} && !document.getElementById('error').hidden")
    assert words in page.text("#error")
    assert page.text("#result") == "" and page.evaluate("document.querySelectorAll('#rounds tr').length") == 0
    method.breaks_after, method.context = None, 4096
    page.click("#ask")
    page.wait_for(DONE)
    assert page.evaluate("document.getElementById('error').hidden")


def test_a_question_that_is_too_long_is_told_the_limit(page):
    page.press("Tab")
    page.write("a" * (QUESTION_CHARACTERS + 1))
    page.click("#ask")
    page.wait_for("!document.getElementById('error').hidden")
    assert page.text("#error") == "question: too long, the limit is 8,000 characters; this one has 8,001"


def test_a_page_whose_server_is_gone_says_so(tab, stand_ins):
    plain, method, _ = stand_ins
    servers = (
        Server("plain decoding", "http://127.0.0.1:9", False),
        Server("SSSD", "http://127.0.0.1:9", True),
    )
    with serving(application("tiny", *servers, TOKENIZER)) as url:
        tab.open(url)
        tab.wait_for(IDLE)
        tab.click("#ask")
        tab.wait_for(f"{IDLE} && !document.getElementById('error').hidden")
        assert "plain decoding: the server at http://127.0.0.1:9 cannot be reached" in tab.text("#error")
    tab.click("#ask")
    tab.wait_for(f"{IDLE} && document.getElementById('error').textContent.includes('make demo')")
    assert tab.text("#error") == "The page's server does not answer. Is make demo still running?"


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_window(page, tmp_path, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.call("Emulation.setDeviceMetricsOverride", size)
    page.click("#ask")
    page.wait_for(DONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(tmp_path / "page.png", "#form", "#rounds")
    assert Image.open(tmp_path / "page.png").width == width
    page.call("Emulation.clearDeviceMetricsOverride", {})


def test_the_command_serves_the_page_and_ends_within_an_answer(stand_ins, tmp_path):
    plain, _, _ = stand_ins
    plain.most = 1  # the answer does not end
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    settings = read_settings({"PORT": str(free_port()), "MODEL": "/models/tiny", "DEVICE": "cpu"})
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(serving(s.application())) for s in stand_ins[:2]]
        ports = [int(url.rpartition(":")[2]) for url in urls]
        part = page_part(settings, tmp_path / "tokenizer.json", *ports)
        child = Child(part.name, part.command, part.environment, tmp_path / "log")
        stack.callback(child.kill)
        wait_until(part.healthy, [child], seconds=60)
        url = f"http://127.0.0.1:{settings.port}"
        assert httpx.get(f"{url}/settings", trust_env=False, timeout=60).json()["names"]["method"] == "SSSD"
        body = {"question": "a", "server": "plain"}
        with httpx.stream("POST", f"{url}/ask", json=body, trust_env=False, timeout=60) as reply:
            lines = reply.iter_lines()
            assert json.loads(next(lines))["tokens"] == 1
            child.stop()
        assert child.status == -signal.SIGTERM, "uvicorn ends as the signal would have ended it"
