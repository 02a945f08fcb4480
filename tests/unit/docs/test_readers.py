"""Four readers find their answers: each question has a heading, on a page at most two clicks from README."""

import re
from pathlib import Path

import pytest

from tests.unit.docs.test_pages import CHECKOUT, anchors

FRONT = CHECKOUT / "README.md"
CLICKS = 2

# By the reader: what is asked, and the page and heading that answers it. "page" alone is answered by how it begins.
WALKS = {
    "a platform engineer with eight H100s and an EAGLE-3 head": {
        "What is it, and what does it gain?": "README.md#what-it-gains",
        "Is it for my batch, head and text?": "docs/decide.md",
        "Can I calculate that before I serve it?": "docs/decide.md#calculate",
        "What becomes of my head?": "docs/heads.md#what-sglangs-drafters-get",
        "What was measured with a head?": "docs/heads.md#when-it-pays",
        "Has it run on an H100?": "docs/compatibility.md#what-has-run-on-a-gpu",
        "Does it run with tensor parallelism, FP8, LoRA?": "docs/compatibility.md#features",
        "Which attention backend will I get?": "docs/compatibility.md#attention-backends",
        "How do I add it to my server?": "README.md#add-it-to-a-server-you-have",
        "How do I check that it is right on my GPU?": "docs/on-your-gpu.md#1-check",
        "How do I see that it works?": "docs/on-your-gpu.md#3-read-the-accept-length",
        "How do I compare it with what I have?": "docs/on-your-gpu.md#4-compare",
        "How much memory does a draft model take?": "docs/draft-model.md#its-memory",
        "Does an output change?": "README.md#lossless",
    },
    "a researcher who knows one of the papers": {
        "Which methods are here, and how far is each?": "README.md#status",
        "Which flags are SSSD's symbols, which commands its figures?": "docs/reproduce.md#sssd",
        "SAGUARO's?": "docs/reproduce.md#saguaro",
        "DOUBLE's?": "docs/reproduce.md#double",
        "DuoDecoding's?": "docs/reproduce.md#duo",
        "Mirror's?": "docs/reproduce.md#mirror",
        "Where does the method differ from the paper?": "docs/method-fidelity.md",
        "What do they call our words?": "docs/glossary.md",
        "What happens in one step, with real tokens?": "docs/architecture.md#one-decode-step-with-real-tokens",
        "How is drafting beside the target simulated?": "docs/when-it-pays.md#how-it-is-simulated",
        "Against what is it compared, with which intervals?": "docs/benchmarks.md",
        "How do I repeat a run?": "docs/benchmarks.md#how-to-repeat-it",
        "What was tried and did not help?": "docs/optimisations.md",
    },
    "an SRE with Kubernetes": {
        "How do I install it in a cluster?": "docs/kubernetes.md#install",
        "How many replicas, and how much memory?": "docs/kubernetes.md#how-many",
        "How do I measure the capacity on my machines?": "docs/limits.md#capacity",
        "TLS, and who may ask?": "docs/kubernetes.md#tls-and-who-may-ask",
        "How are tenants kept apart?": "docs/requests.md#tenants",
        "What do I watch?": "docs/kubernetes.md#watch",
        "Which metrics are there?": "docs/metrics.md",
        "An alert fires: what now?": "docs/runbook.md",
        "What is lost when the datastore dies?": "docs/durability.md#what-survives-what",
        "How do I back it up?": "docs/kubernetes.md#back-up-and-upgrade",
        "How do I upgrade and roll back?": "docs/upgrade.md#rollback",
        "What can go wrong with prefill and decode apart?": "docs/disaggregation.md#what-happens-when-something-fails",
        "What does it give away?": "docs/security.md#what-the-speed-gives-away",
        "Which options does the service have?": "docs/cli.md#serve",
    },
    "a contributor": {
        "How do I set up?": "CONTRIBUTING.md#setup",
        "What do I run for my change?": "CONTRIBUTING.md#while-you-work",
        "How is a change checked?": "CONTRIBUTING.md#how-a-change-is-checked",
        "What does each test command run?": "docs/tests.md",
        "Where in the code do I look first?": "docs/architecture.md#where-to-look-first",
        "Which package may import which?": "docs/architecture.md#packages-and-their-imports",
        "How do I support the next SGLang?": "docs/upgrade.md#the-next-sglang",
        "Where do the files lie on disk?": "docs/storage-format.md",
        "Was my idea tried?": "docs/optimisations.md",
        "How do I report a vulnerability?": "SECURITY.md",
        "What has changed?": "CHANGELOG.md",
    },
}
ASKED = [
    pytest.param(place, id=f"{reader}: {question}")
    for reader, questions in WALKS.items()
    for question, place in questions.items()
]


def linked(page: Path) -> set[Path]:
    """The project's pages that a page links to."""
    targets = re.findall(r"\]\(([^)\s#]+\.md)[^)\s]*\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets if not target.startswith("http")}


def within(clicks: int) -> set[Path]:
    """The pages that so many links lead to, from README."""
    reached = {FRONT}
    for _ in range(clicks):
        reached |= {page for at in reached for page in linked(at)}
    return reached


@pytest.mark.parametrize("place", ASKED)
def test_a_reader_s_question_is_answered_two_clicks_from_readme(place):
    file, _, heading = place.partition("#")
    page = CHECKOUT / file
    assert page in within(CLICKS)
    assert not heading or heading in anchors(page)


def test_clicks_are_counted():
    assert within(0) == {FRONT}
    assert CHECKOUT / "docs" / "decide.md" in within(1)
    assert CHECKOUT / "docs" / "storage-format.md" in within(2) - within(1)


def test_every_page_is_two_clicks_from_readme():
    assert {page.resolve() for page in (CHECKOUT / "docs").rglob("*.md")} <= within(CLICKS)


def test_readme_s_figures_are_those_of_the_results():
    """No figure with an interval is in README that its page of results does not have."""
    figures = re.findall(r"\d\.\d\d \[\d+\.\d\d, \d+\.\d\d\]", FRONT.read_text())
    results = (CHECKOUT / "docs" / "benchmarks.md").read_text()
    assert figures and [figure for figure in figures if figure not in results] == []
