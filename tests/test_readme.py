"""The README files: their links lead somewhere, their example runs, the commands they name exist."""

import re
import subprocess
import sys

import pytest

from harness.paths import ROOT

TRACKED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT,
    capture_output=True,
    text=True,
).stdout.split()
DOCUMENTS = TRACKED or [
    str(path.relative_to(ROOT)) for pattern in ("*.md", "conclusions/**/*.md") for path in ROOT.glob(pattern)
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_resolves(document):
    path = ROOT / document
    missing = [
        link
        for link in LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL))
        if not link.startswith(("http", "#")) and not (path.parent / link.partition("#")[0]).exists()
    ]
    assert missing == []


def test_the_python_example_runs_as_written():
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(examples) == 1
    run = subprocess.run(
        [sys.executable, "-c", examples[0]], cwd=ROOT / "scr", capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named - targets == set() and {"bench", "test"} <= named


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def test_every_commit_that_is_named_exists():
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no git history here, or only its end")
    named = re.findall(r"`([0-9a-f]{7})`", (ROOT / "README.md").read_text())
    assert named
    assert [commit for commit in named if git("merge-base", "--is-ancestor", commit, "HEAD").returncode] == []


def test_the_study_s_pictures_are_shown():
    text = (ROOT / "README.md").read_text()
    for name in ("speedup", "ladder", "timeline"):
        assert re.search(rf"!\[[^\]]{{20,}}\]\(output/[^)]*/{name}\.png\)", text), name


def test_every_picture_has_an_alternative_text():
    for document in ("README.md", "conclusions/README.md"):
        path = ROOT / document
        if path.exists():
            texts = re.findall(r"!\[([^\]]*)\]", path.read_text())
            assert all(len(text) > 20 for text in texts), texts
