"""What every command shares: settings as a frozen dataclass, faults in one sentence, exit statuses."""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from harness.paths import shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
QUICK_TAG = "quick"  # of runs with --quick, which are for a look and must not replace a full one


class Fault(Exception):
    """Something the user can mend. The message is one sentence: what is wrong, where, what to do."""


def run_command(main: Callable[[], int | None]) -> None:
    """Run `main` and exit with its status: 2 after a Fault (one sentence on stderr), 130 after Ctrl-C."""
    try:
        sys.exit(main() or 0)
    except Fault as fault:
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def parse_settings(
    settings: type[Settings],
    description: str | None,
    arguments: list[str] | None = None,
    quick: Mapping[str, Any] | None = None,
) -> Settings:
    """Read the command line into the frozen dataclass `settings`, whose defaults are the options' defaults.

    A field `batch_sizes: tuple[int, ...]` becomes `--batch-sizes 1 16 64`, or `1,16,64`; a bool becomes a
    flag pair `--name/--no-name`; `T | None` takes a T. A field's `metadata` gives `help`, and optionally
    `choices`. `quick` holds the defaults that `--quick` brings: an option that is given wins over them.
    """
    quick = quick or {}
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    hints = get_type_hints(settings)
    for field in fields(settings):
        kind, many = _element_type(hints[field.name])
        choices = field.metadata.get("choices")
        text = _help(field, quick)
        # What is not given is left out of the result, which tells it from a default that is given.
        options: dict[str, Any] = {"default": argparse.SUPPRESS}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif many:
            options.update(type=_several(kind, choices), nargs="+")
            options["metavar"] = f"{{{','.join(choices)}}}" if choices else None
        else:
            options.update(type=kind, choices=choices)
        parser.add_argument("--" + field.name.replace("_", "-"), help=text.replace("%", "%%"), **options)
    given = vars(parser.parse_args(arguments))
    if given.get("quick"):
        given = {**quick, **given}
    return settings(**{name: _flat(v) if isinstance(v, list) else v for name, v in given.items()})


def check_tag(tag: str | None) -> None:
    """Raise Fault for a --tag that cannot name a folder of a reference run."""
    if tag is not None and (tag == "plots" or not TAG.fullmatch(tag)):
        raise Fault(f"the tag {tag!r} is no good: letters, digits, - and _; it names a folder.")


def _help(field: Field[Any], quick: Mapping[str, Any]) -> str:
    """The help of an option, with its defaults."""
    notes = [] if field.default in (None, "", ()) else [f"default: {_words(field.default)}"]
    notes += [f"with --quick: {_words(quick[field.name])}"] if field.name in quick else []
    return field.metadata.get("help", "") + (f" ({'; '.join(notes)})" if notes else "")


def _words(value: Any) -> str:
    """A default as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return shown(value) if isinstance(value, Path) else str(value)


def _several(kind: type, choices: Sequence[str] | None) -> Callable[[str], list[Any]]:
    """A converter of one word of a list option: commas part values as spaces do, except in paths."""

    def convert(word: str) -> list[Any]:
        parts = [word] if issubclass(kind, Path) else [part for part in word.split(",") if part]
        for part in parts:
            if choices and part not in choices:
                raise argparse.ArgumentTypeError(
                    f"invalid choice: {part!r} (choose from {', '.join(choices)})"
                )
        return [kind(part) for part in parts]

    convert.__name__ = kind.__name__  # argparse says "invalid int value" by it
    return convert


def _flat(lists: list[list[Any]]) -> tuple[Any, ...]:
    """The values of a list option."""
    return tuple(value for words in lists for value in words)


def _element_type(hint: Any) -> tuple[type, bool]:
    """The type of one command-line word for a field of type `hint`, and whether the field takes several."""
    if isinstance(hint, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if getattr(hint, "__origin__", None) is tuple:
        return get_args(hint)[0], True
    return (Path if hint is Path else hint), False
