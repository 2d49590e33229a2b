"""The latest epoch that a worker has seen of each session."""

from __future__ import annotations

from holdfast.errors import StaleEpoch

MAX_SESSIONS = 65_536
"""Sessions whose epoch is remembered. The journal fences every write anyway; this refuses earlier."""


class SessionEpochs:
    """Refuses commands under an epoch that has passed (law L11). Used in the leader's thread."""

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}

    def latest(self, session_id: str) -> int:
        """0 if the session is not known."""
        return self._latest.get(session_id, 0)

    def check(self, session_id: str, epoch: int) -> None:
        """Raises StaleEpoch if a later epoch was seen."""
        latest = self.latest(session_id)
        if epoch < latest:
            raise StaleEpoch(f"session {session_id} is at epoch {latest} on this worker; epoch {epoch} has passed")

    def remember(self, session_id: str, epoch: int) -> None:
        """Refuse commands under an earlier epoch from now on."""
        self._latest[session_id] = epoch
        if len(self._latest) > MAX_SESSIONS:
            del self._latest[next(iter(self._latest))]

    def forget(self, session_id: str) -> None:
        """The session was released here."""
        self._latest.pop(session_id, None)
