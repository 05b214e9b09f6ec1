"""What all tests share."""

from typing import Any


def pytest_make_parametrize_id(config: Any, val: object, argname: str) -> str | None:
    """Bytes make no names: archives hold the time they were made, and every process must know a test by the same."""
    return argname if isinstance(val, bytes) else None
