"""What every command shares: settings as a frozen dataclass, faults in one sentence, exit statuses."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

Settings = TypeVar("Settings")


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
    settings: type[Settings], description: str, arguments: list[str] | None = None
) -> Settings:
    """Read the command line into the frozen dataclass `settings`, whose defaults are the options' defaults.

    A field `batch_sizes: tuple[int, ...]` becomes `--batch-sizes 1 16 64`; a bool becomes a flag pair
    `--name/--no-name`; `T | None` takes a T. A field's `metadata` gives `help`, and optionally `choices`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    hints = get_type_hints(settings)
    for field in fields(settings):
        kind, many = _element_type(hints[field.name])
        default = field.default if field.default is not MISSING else None
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        text = field.metadata.get("help", "")
        if shown not in (None, ""):
            text += f" (default: {shown})"
        options: dict[str, Any] = {"default": default, "help": text.replace("%", "%%")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
            options["help"] = field.metadata.get("help", "")
        else:
            options.update(type=kind, choices=field.metadata.get("choices"))
            options.update(nargs="+" if many else None, metavar=field.metadata.get("metavar"))
        parser.add_argument("--" + field.name.replace("_", "-"), **options)
    values = vars(parser.parse_args(arguments))
    return settings(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def _element_type(hint: Any) -> tuple[type, bool]:
    """The type of one command-line word for a field of type `hint`, and whether the field takes several."""
    if isinstance(hint, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if getattr(hint, "__origin__", None) is tuple:
        return get_args(hint)[0], True
    return (Path if hint is Path else hint), False
