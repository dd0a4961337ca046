"""The command line of every command: options from a dataclass, --quick, lists, tags, exit statuses."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

import report
from harness.cli import QUICK_TAG, Fault, check_tag, parse_settings, run_command
from harness.record import save
from synthetic_record import make_record


@dataclass(frozen=True)
class Settings:
    """One option of each form."""

    trials: int = field(default=200, metadata={"help": "how many, 100 % of them"})
    sizes: tuple[int, ...] = field(default=(1, 16), metadata={"help": "images"})
    levels: tuple[str, ...] = field(default=("a",), metadata={"choices": ("a", "b")})
    files: tuple[Path, ...] = ()
    layers: bool = True
    quick: bool = False
    limit: float | None = None
    where: str = field(default="here", metadata={"choices": ("here", "there")})


QUICK = {"trials": 20, "layers": False, "sizes": (1,)}


def parse(*words: str) -> Settings:
    return parse_settings(Settings, "", list(words), QUICK)


def test_defaults_are_those_of_the_dataclass() -> None:
    assert parse() == Settings()


def test_every_form_of_an_option() -> None:
    given = parse("--trials", "3", "--no-layers", "--limit", "2.5", "--files", "x,y.npz", "--where", "there")
    assert given == Settings(3, layers=False, limit=2.5, files=(Path("x,y.npz"),), where="there")


@pytest.mark.parametrize("words", [["1", "2", "3"], ["1,2,3"], ["1,", "2,", "3"], ["1,2", "3"]])
def test_a_list_takes_spaces_and_commas(words: list[str]) -> None:
    assert parse("--sizes", *words).sizes == (1, 2, 3)


def test_the_last_of_two_lists_counts() -> None:
    assert parse("--levels", "b", "--levels", "a,b").levels == ("a", "b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--levels", "a,c"], "argument --levels: invalid choice: 'c' (choose from a, b)"),
        (["--sizes", "1,x"], "argument --sizes: invalid int value: '1,x'"),
        (["--where", "nowhere"], "invalid choice: 'nowhere'"),
    ],
)
def test_bad_words_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*words)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_what_is_given_wins_over_quick_even_where_it_is_the_default() -> None:
    assert parse("--quick") == Settings(20, (1,), layers=False, quick=True)
    given = parse("--quick", "--trials", "200", "--layers", "--sizes", "1", "16")
    assert given == Settings(quick=True)


def test_the_help_names_both_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "how many, 100 % of them (default: 200; with --quick: 20)" in said
    assert "images (default: 1 16; with --quick: 1)" in said


@pytest.mark.parametrize("tag", ["", "plots", "../x", "a b", "-x", "a.b"])
def test_a_tag_names_a_folder(tag: str) -> None:
    check_tag("m1-pro_2")
    with pytest.raises(Fault, match="names a folder"):
        check_tag(tag)


def test_all_stored_runs_are_those_that_no_quick_run_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(report, "CONCLUSIONS", tmp_path / "conclusions")
    record = make_record(backends=("torch",), batch_sizes=(1,))
    for tag in ("", "m1", QUICK_TAG):
        save(record, tmp_path / "output" / tag / "per_trial.npz")
    named = [conclusions.relative_to(tmp_path).as_posix() for _, conclusions in report.folders("all")]
    assert named == ["conclusions", "conclusions/m1"]
    assert report.folders(QUICK_TAG)[0][1] == tmp_path / "conclusions" / "quick", "it is there when asked for"


def test_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    def fault() -> int:
        raise Fault("it is missing.")

    def stop() -> int:
        raise KeyboardInterrupt

    for main, status in ((lambda: None, 0), (lambda: 1, 1), (fault, 2), (stop, 130)):
        with pytest.raises(SystemExit) as exit_:
            run_command(main)
        assert exit_.value.code == status
    assert capsys.readouterr().err == "error: it is missing.\ninterrupted\n"
