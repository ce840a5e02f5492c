"""Whether to draft at all: stepping aside where plain passes are faster, and looking again."""

from __future__ import annotations

from dataclasses import dataclass

_MARGIN = 1.05  # what the other way must promise: noise shall not move it
_PATIENCE = 8  # cycles between two changes
_FIRST_PROBE = 16  # cycles aside until drafting is tried once; doubled from probe to probe
_RAREST_PROBE = 1024


@dataclass
class StepAside:
    """A switch with hysteresis.

    Aside, one cycle is drafted now and then, since text and machine change: a probe. While probes
    find nothing they become rarer.

    Attributes:
        is_aside: whether speculation has stepped aside.
    """

    is_aside: bool = False
    _since_change: int = 0
    _until_probe: int = 0
    _interval: int = _FIRST_PROBE

    def drafts(self, drafting_rate: float, plain_rate: float) -> bool:
        """Whether the next cycle drafts; to be asked once a cycle.

        Args:
            drafting_rate: expected tokens a second of the best way to draft.
            plain_rate: expected tokens a second without drafts.
        """
        self._since_change += 1
        current, other = drafting_rate, plain_rate
        if self.is_aside:
            current, other = other, current
        elif self._since_change == self._interval:  # drafting has lasted: trust it again
            self._interval = _FIRST_PROBE
        if other > _MARGIN * current and self._since_change > _PATIENCE:
            self.is_aside = not self.is_aside
            self._since_change = 0
            self._until_probe = self._interval
        return not self.is_aside or self._is_probe_due()

    def look_again(self) -> None:
        """Something new came: probe soon."""
        self._interval = _FIRST_PROBE
        self._until_probe = min(self._until_probe, 1)

    def _is_probe_due(self) -> bool:
        self._until_probe -= 1
        if self._until_probe > 0:
            return False
        self._interval = min(2 * self._interval, _RAREST_PROBE)
        self._until_probe = self._interval
        return True
