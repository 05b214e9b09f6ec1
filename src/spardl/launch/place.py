"""Where a process stands in a run, as launchers say it in the environment. No torch here."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from spardl.errors import ConfigError
from spardl.launch.launchers import heard_from_launcher, whole

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LISTENER = "SPARDL_LISTENER"


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank of a run, and the address at which its ranks meet.

    listener    descriptor of a socket that already listens there, inherited from our own launcher (rank 0)
    hosted      whether the launcher keeps the store itself, as torchrun does, over restarts
    """

    rank: int
    workers: int
    host: str
    port: int
    listener: int | None = None
    hosted: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"WORLD_SIZE={self.workers} leaves nobody to work; give 1 or more.")
        if not 0 <= self.rank < self.workers:
            raise ConfigError(f"RANK={self.rank} is outside a world of {self.workers}; give 0 to {self.workers - 1}.")
        if not 0 < self.port < 65536:
            raise ConfigError(f"MASTER_PORT={self.port} is not a port; give 1 to 65535.")
        if not self.host:
            raise ConfigError("MASTER_ADDR is empty; give the address of rank 0.")

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """The place that a launcher has set, or None if there was no launcher.

        RANK and WORLD_SIZE come first, as torchrun and our own launcher set them; then mpiexec's, then srun's.
        """
        if "RANK" in environment or "WORLD_SIZE" in environment:
            return cls._explicit(environment)
        return cls._from_mpiexec_or_srun(environment)

    @classmethod
    def _explicit(cls, environment: Mapping[str, str]) -> Self:
        missing = [name for name in VARIABLES if name not in environment]
        if missing:
            given = ", ".join(name for name in VARIABLES if name in environment)
            raise ConfigError(f"{given} set without {', '.join(missing)}; a rank needs all of {', '.join(VARIABLES)}.")
        return cls(
            rank=whole("RANK", environment),
            workers=whole("WORLD_SIZE", environment),
            host=environment["MASTER_ADDR"],
            port=whole("MASTER_PORT", environment),
            listener=whole(LISTENER, environment) if LISTENER in environment else None,
            hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    @classmethod
    def _from_mpiexec_or_srun(cls, environment: Mapping[str, str]) -> Self | None:
        """Rank and size as the launcher has them; the address as MASTER_ADDR and MASTER_PORT say, or as it implies."""
        told = heard_from_launcher(environment)
        if told is None:
            return None
        host = environment.get("MASTER_ADDR", told.host)
        port = whole("MASTER_PORT", environment) if "MASTER_PORT" in environment else told.port
        if host is None or port is None:
            needed = {"MASTER_ADDR to the address of rank 0": host, "MASTER_PORT to a free port there": port}
            missing = " and ".join(what for what, value in needed.items() if value is None)
            raise ConfigError(
                f"{told.launcher} does not say where its {told.workers} ranks meet, and they may be on several hosts;"
                f" set {missing}, the same on all ranks."
            )
        return cls(rank=told.rank, workers=told.workers, host=host, port=port)
