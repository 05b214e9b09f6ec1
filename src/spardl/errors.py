"""The one tree of errors. Each is a sentence that says what happened and what to do."""


class SparDLError(Exception):
    """Root of every error that spardl raises on purpose."""


class ConfigError(SparDLError, ValueError):
    """A setting that cannot work, found before anything was sent."""


class DataError(SparDLError, ValueError):
    """A data set that is missing, damaged or not understood. The text names the file."""


class CheckpointError(SparDLError):
    """A checkpoint that is damaged, is of another run, or could not be written.

    `writing` says that it could not be written; what lies on the disk is then the checkpoints before it.
    """

    def __init__(self, message: str, *, writing: bool = False) -> None:
        super().__init__(message)
        self.writing = writing


class StateError(SparDLError):
    """Something was called at the wrong time: on a transport that is closed, or in a step that is over."""


class ConfigMismatch(SparDLError):
    """Two ranks were started with different settings or different models."""

    def __init__(self, message: str, *, ranks: tuple[int, int]) -> None:
        super().__init__(message)
        self.ranks = ranks


class ProtocolError(SparDLError):
    """A peer sent bytes that are not a valid frame here and now. Nothing of it was applied."""

    def __init__(self, message: str, *, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class PeerError(SparDLError):
    """A peer died or stayed silent for longer than the timeout.

    `peer` is the rank to blame: this rank's own, if it was the one that was away; None where nobody can tell.
    `candidates` are all that it may have been.
    """

    def __init__(self, message: str, *, peer: int | None = None, candidates: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.peer = peer
        self.candidates = candidates or (() if peer is None else (peer,))


class ReplicaError(SparDLError):
    """Ranks that should hold the same tensors do not. `ranks` are those that differ from most, first in `tensor`."""

    def __init__(self, message: str, *, ranks: tuple[int, ...], tensor: str) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.tensor = tensor


class AbsentPeer(PeerError):
    """A rank never came to where the ranks of a run meet: it was not started, or waits at another address."""


class LeftBehind(PeerError):
    """The other ranks have gone on without this one, which did not come in time. `peer` is this rank's own."""


class Stopped(SparDLError):
    """A run was asked to stop by a signal, has saved where it stands, and can go on from there."""

    def __init__(self, message: str, *, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class SparDLWarning(UserWarning):
    """Something works, but not as well as it could: the text says what to change."""
