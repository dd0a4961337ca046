"""For values whose type allows None, where the program has made sure that they are there."""

from typing import TypeVar

Value = TypeVar("Value")


def present(value: Value | None) -> Value:
    """`value`. Raises AssertionError for None: a bug of the caller's, not of the input."""
    assert value is not None
    return value
