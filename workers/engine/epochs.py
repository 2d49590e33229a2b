"""The latest epoch that a worker has seen of each session."""

from __future__ import annotations

import time
from collections import deque

from holdfast.errors import StaleEpoch
from holdfast.wire import LAST_EPOCH

MAX_SESSIONS = 65_536
"""Sessions whose epoch is remembered. The journal fences every write anyway; this refuses earlier."""
RELEASED_S = 3600.0
"""How long a released session's epoch is remembered. What was sent before its release, on a connection that was cut,
may arrive after it; much later its id may be used again, for a new session that begins with the first epoch.
"""


class SessionEpochs:
    """Refuses commands under an epoch that has passed (law L11). Used in the leader's thread."""

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}
        self._released: deque[tuple[float, str, int]] = deque()

    def latest(self, session_id: str) -> int:
        """0 if the session is not known."""
        return self._latest.get(session_id, 0)

    def check(self, session_id: str, epoch: int) -> None:
        """Raises StaleEpoch if a later epoch was seen."""
        self._forget_released()
        latest = self.latest(session_id)
        if epoch < latest:
            raise StaleEpoch(f"session {session_id} is at epoch {latest} on this worker; epoch {epoch} has passed")

    def remember(self, session_id: str, epoch: int) -> None:
        """Refuse commands under an earlier epoch from now on."""
        self._latest[session_id] = epoch
        if len(self._latest) > MAX_SESSIONS:
            del self._latest[next(iter(self._latest))]

    def released(self, session_id: str, epoch: int) -> None:
        """The session was released here, or lives elsewhere from that epoch on."""
        if epoch == LAST_EPOCH:
            self._latest.pop(session_id, None)  # the journal does not know it any more
            return
        self.remember(session_id, epoch)
        self._released.append((time.monotonic(), session_id, epoch))

    def _forget_released(self) -> None:
        oldest = time.monotonic() - RELEASED_S
        while self._released and self._released[0][0] < oldest:
            _, session_id, epoch = self._released.popleft()
            if self._latest.get(session_id) == epoch:
                del self._latest[session_id]
