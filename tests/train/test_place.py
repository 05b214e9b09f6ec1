"""A rank learns its place from the environment that launchers set."""

import pytest

from spardl.errors import ConfigError
from spardl.train.place import LISTENER, Place

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_a_launchers_variables_are_the_place() -> None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say everything."""
    assert Place.from_environment(TORCHRUN) == Place(rank=1, workers=4, host="10.0.0.1", port=29500)


def test_without_a_launcher_there_is_no_place() -> None:
    """An address alone, left in a shell, makes no rank."""
    assert Place.from_environment({"MASTER_ADDR": "10.0.0.1"}) is None


def test_torchrun_keeps_the_store_itself() -> None:
    """Its agent listens at the port already; rank 0 must not. Restarts do not meet what an earlier attempt left."""
    place = Place.from_environment(
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    )
    assert place is not None and place.hosted and place.attempt == 2


def test_our_own_launcher_hands_down_a_listening_socket() -> None:
    """Rank 0 inherits it, so nobody can take the port in between."""
    place = Place.from_environment({**TORCHRUN, LISTENER: "7"})
    assert place is not None and place.listener == 7


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"RANK": "4"}, "outside a world of 4"),
        ({"RANK": "-1"}, "outside a world of 4"),
        ({"WORLD_SIZE": "0"}, "1 or more"),
        ({"RANK": "one"}, "not a whole number"),
        ({"MASTER_PORT": "70000"}, "1 to 65535"),
        ({"MASTER_ADDR": ""}, "address of rank 0"),
    ],
)
def test_a_place_that_cannot_be_is_refused(change: dict[str, str], sentence: str) -> None:
    """The sentence names the variable."""
    with pytest.raises(ConfigError, match=sentence) as refusal:
        Place.from_environment({**TORCHRUN, **change})
    assert next(iter(change)) in str(refusal.value)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_place_is_refused(name: str) -> None:
    """A rank that does not know the others would wait for nobody."""
    with pytest.raises(ConfigError, match=f"without {name}"):
        Place.from_environment({key: value for key, value in TORCHRUN.items() if key != name})
