"""What the pages show and link to is there."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
DOCS = CHECKOUT / "docs"
PAGES = sorted([*CHECKOUT.glob("*.md"), *DOCS.rglob("*.md")])
MAKEFILE = (CHECKOUT / "Makefile").read_text()
PROGRAMS = ("benchmarks", "datastore_service", "deploy", "docs", "proto_gen", "sglang_patches", "tests")
ARCHITECTURE = (DOCS / "architecture.md").read_text()


def anchors(page: Path) -> set[str]:
    """As GitHub names headings."""
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))


@each_page
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@each_page
def test_a_target_of_make_is_one(page):
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    named = re.findall(
        r"(?:^ {4}(?:.* )?|`(?:[A-Z_]+=\S+ )*)make ([a-z]+(?:-[a-z]+)*)", page.read_text(), re.MULTILINE
    )
    assert set(named) <= targets


@each_page
def test_a_program_that_a_page_runs_is_there(page):
    for module in re.findall(r"python3? -m ((?:\w+\.)*\w+)", page.read_text()):
        if module.partition(".")[0] in PROGRAMS:
            place = CHECKOUT.joinpath(*module.split("."))
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module
    for script in re.findall(r"python ((?:\w+/)+\w+\.py)", page.read_text()):
        assert (CHECKOUT / script).exists(), script


def test_every_page_is_in_the_table_of_contents():
    contents = (DOCS / "README.md").read_text()
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([^)]+\.md)\)", contents))


def test_what_was_not_kept_is_listed_first():
    opening, *ideas = re.split(r"^## ", (DOCS / "optimisations.md").read_text(), flags=re.MULTILINE)
    left_out = [
        idea.partition("\n")[0]
        for idea in ideas
        if re.search(r"\*\*Verdict\.\*\*\s+(Not kept|Removed|Replaced|Off|No server)", idea)
    ]
    assert left_out and {anchor(heading) for heading in left_out} <= set(re.findall(r"\(#([^)]+)\)", opening))


def test_the_worked_example_is_what_the_script_prints(demo_model, monkeypatch):
    monkeypatch.setattr("sys.argv", ["worked_example.py"])
    (shown,) = re.findall(r"^```text\n(.*?)^```", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    assert printed(lambda: runpy.run_path(f"{CHECKOUT}/docs/worked_example.py", run_name="__main__")) == shown


def test_the_draft_without_a_model_is_the_example_s():
    (code,) = re.findall(r"^```python\n(.*?)^```", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    assert printed(lambda: exec(code, {})).strip() == re.search(r"\.tokens\)  # (\[.*\])", code)[1]


def printed(run) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run()
    return out.getvalue()


def test_the_picture_of_the_packages_has_all_of_them():
    pytest.importorskip("grimp", reason="needs grimp, which reads the imports")
    program = runpy.run_path(str(DOCS / "packages.py"))
    drawn = {box.label for arrow in program["imports"](CHECKOUT) for box in arrow}
    picture = (DOCS / "packages.svg").read_text()
    assert drawn == set(re.findall(r"<text x=\S+ y=\S+ text-anchor=\S+>(.*?)</text>", picture))
