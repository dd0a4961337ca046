"""Recompute every number in README.md and conclusions/README.md that comes from a run.

    python scr/claims.py            # exit status 1 where a text differs from the run it names
    python scr/claims.py --write    # set the numbers to what the runs say

How a number is tied to a run: scr/harness/claims.py. Takes about two seconds.
"""

from dataclasses import dataclass, field

from harness.claims import CLAIM, check, documents, update
from harness.cli import parse_settings, run_command
from harness.paths import shown, write_atomic


@dataclass(frozen=True)
class Settings:
    """What to do with numbers that differ."""

    write: bool = field(default=False, metadata={"help": "set the numbers to what the runs say"})


def main() -> int:
    """Check, or write. Returns the exit status."""
    settings = parse_settings(Settings, __doc__)
    status = 0
    for path in documents():
        text = path.read_text()
        if settings.write and update(text) != text:
            text = update(text)
            write_atomic(path, text)
            print(f"wrote {shown(path)}")
        mismatches = check(text)
        for mismatch in mismatches:
            print(f"{shown(path)}: {mismatch}")
        print(f"{shown(path)}: {len(CLAIM.findall(text))} claims, {len(mismatches)} wrong")
        status = status or int(bool(mismatches))
    return status


if __name__ == "__main__":
    run_command(main)
