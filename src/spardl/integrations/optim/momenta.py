"""All optimizers of one model whose momentum acts before the selection, and the session that it acts in."""

import warnings
from collections.abc import Mapping, Sequence

from torch.nn import Parameter
from torch.optim import Optimizer

from spardl.errors import SparDLWarning
from spardl.integrations.optim.momentum import LocalMomentum, plain_rule
from spardl.memory.velocity import Momentum
from spardl.sync.session import Session

NOT_LOADED = (
    "An optimizer with momentum has loaded a state, and its velocities are in the state of spardl: load that too, with"
    " load_state_dict() of what attach returned, or momentum and residuals start from zero."
)


class Momenta:
    """Empty, if no optimizer that was given has momentum or weight decay to move."""

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, Parameter], session: Session) -> None:
        names = {parameter: name for name, parameter in parameters.items()}
        self._parameters = parameters
        self._session = session
        self._moved = [LocalMomentum(each, names) for each in optimizers if LocalMomentum.settings_of(each) is not None]
        self.inherit()

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those whose momentum has moved."""
        return [each.optimizer for each in self._moved]

    def inherit(self) -> None:
        """Momentum that an optimizer already had is every rank's velocity: their mean is what it was."""
        for each in self._moved:
            each.adopt()
            for name, velocity in each.take_velocities().items():
                self._session.sync.set_velocity(name, velocity)

    def rules(self, *, loaded: bool) -> dict[str, Momentum]:
        """What the optimizers would do to each parameter's gradient now. `loaded`: the session has loaded a state."""
        if not self._moved:
            return {}
        self.inherit()
        rules = {name: plain_rule(parameter) for name, parameter in self._parameters.items()}
        for each in self._moved:
            if each.reloaded and not loaded:
                warnings.warn(NOT_LOADED, SparDLWarning, stacklevel=2)
            each.reloaded = False
            rules |= each.rules()
        return rules

    def end(self) -> None:
        """Give momentum back to the optimizers, with the mean velocity, and apply what residuals hold. Collective."""
        if not self._moved:
            return
        self.inherit()
        stepped = sorted(name for each in self._moved for name in each.stepped_names())
        residuals, velocities = self._session.drain(stepped)
        for each in self._moved:
            each.restore(residuals, velocities)
        self._moved = []
