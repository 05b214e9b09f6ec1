"""An invitation: the text with which a newcomer finds the ranks of a run, and proves that it may join them."""

from collections.abc import Mapping
from dataclasses import dataclass

from spardl.errors import ConfigError
from spardl.transport.words import Place

PREFIX = "spardl:"
SECRET = 32  # bytes


@dataclass(frozen=True)
class Invitation:
    """The secret of a run, which is all that its ranks ask for, and where they answer, by their numbers."""

    secret: bytes
    places: Mapping[int, Place]

    def __str__(self) -> str:
        places = ",".join(f"{number}@{host}@{port}" for number, (host, port) in self.places.items())
        return f"{PREFIX}{self.secret.hex()}:{places}"

    @classmethod
    def of(cls, text: str) -> "Invitation":
        """What `str` made of one.

        Raises:
            ConfigError: this is none.
        """
        try:
            secret, places = text.strip().removeprefix(PREFIX).split(":", 1)
            parts = [place.split("@") for place in places.split(",")]
            found = {int(number): (host, int(port)) for number, host, port in parts}
            if not text.strip().startswith(PREFIX) or len(bytes.fromhex(secret)) != SECRET or min(found) < 0:
                raise ValueError("it does not begin as one")
            return cls(bytes.fromhex(secret), found)
        except ValueError as error:
            raise ConfigError(
                f"this is no invitation ({error}); take the text that sync.company.invitation has on a rank of the run."
            ) from error
