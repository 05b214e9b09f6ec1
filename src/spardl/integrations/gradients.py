"""What handles of synchronised gradients have in common: parameters by name, and momentum that may have moved."""

from collections.abc import Mapping
from typing import Any

from torch.nn import Parameter

from spardl.integrations.handle import SyncHandle
from spardl.integrations.optim.momenta import Momenta


class GradientHandle(SyncHandle):
    """Of a front end that knows gradients by their parameters' names, so that momentum can act before the selection."""

    _parameters: Mapping[str, Parameter]
    _momenta: Momenta
    _loaded = False  # whether a state was

    @property
    def weights(self) -> Mapping[str, Parameter]:
        return self._parameters

    def _settle(self) -> None:
        """Momentum that an optimizer has got meanwhile is the session's."""
        super()._settle()
        self._momenta.inherit()

    def _leave(self) -> None:
        """Nobody else averages these gradients, so whatever delivers them stays, and averages densely."""
        self._momenta.end()

    def _load_extras(self, state: Mapping[str, Any]) -> None:
        self._loaded = True
