"""One tree of errors, all of which can be had from the package itself."""

import pytest

import spardl
from spardl import errors

OF_USE = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.SparDLError)]


@pytest.mark.parametrize("error", OF_USE, ids=lambda error: error.__name__)
def test_every_error_has_one_root_and_says_what_it_means(error: type[Exception]) -> None:
    """Whoever catches `SparDLError` catches everything that is raised on purpose."""
    assert issubclass(error, spardl.SparDLError)
    assert error.__doc__


@pytest.mark.parametrize("error", OF_USE, ids=lambda error: error.__name__)
def test_every_error_is_part_of_the_package(error: type[Exception]) -> None:
    """A user's `except` needs no module of ours."""
    assert getattr(spardl, error.__name__) is error
    assert error.__name__ in spardl.__all__


def test_values_that_cannot_be_used_are_value_errors_too() -> None:
    """Settings and data are what a caller passed in."""
    assert issubclass(spardl.ConfigError, ValueError)
    assert issubclass(spardl.DataError, ValueError)
    assert not issubclass(spardl.CheckpointError, ValueError)
