"""The end of a turn: whether its session keeps the turn, rolls it back, or leaves it open for any router."""

from __future__ import annotations

import asyncio
import logging

from holdfast.errors import HoldfastError, JournalUnavailable, SessionNotFound, SessionReleased
from router.journal.interface import Journal
from router.turns.background import BackgroundTasks
from router.turns.live import LiveTurns
from router.turns.sessions import Session, Sessions
from router.turns.turn import LiveTurn

log = logging.getLogger("holdfast.router")
RETRY_S = 0.5


class Settler:
    """Settles what becomes of a session when its turn ends, and passes the session to the next turn."""

    def __init__(self, journal: Journal, sessions: Sessions, live: LiveTurns, background: BackgroundTasks) -> None:
        self._journal = journal
        self._sessions = sessions
        self._live = live
        self._background = background

    async def keep(self, turn: LiveTurn, session: Session) -> None:
        """The turn completed, and the journal has it."""
        self._sessions.unlock(session)

    async def keep_shown(self, turn: LiveTurn, session: Session) -> None:
        """The turn failed: leave it open, so that any router can resume it, if its client has seen output."""
        if not turn.num_output:
            await self.roll_back(turn, session)
            return
        self._sessions.forget(session.session_id)
        self._sessions.unlock(session)
        await self._leave_open(turn, session)

    async def roll_back(self, turn: LiveTurn, session: Session) -> None:
        """The turn was aborted: return the session to its last good turn."""
        try:
            if await self._journal.abort_turn(session.session_id, turn.request.turn_id):
                if turn.request.rolled_back is not None:
                    await turn.request.rolled_back()
            else:
                # It completed after all, or another router owns it: this router's copy may be outdated.
                self._sessions.forget(session.session_id)
        except (SessionNotFound, SessionReleased):
            pass
        except HoldfastError as error:
            # Whether the journal has the turn is unknown: load the session again before its next use.
            log.warning(
                "session %s: cannot roll back its turn: %s", session.session_id, error.message, extra=turn.log_fields
            )
            self._sessions.forget(session.session_id)
            await self._leave_open(turn, session)
        finally:
            self._sessions.unlock(session)

    async def _leave_open(self, turn: LiveTurn, session: Session) -> None:
        """Let any router resume the turn or roll it back. Retries while the journal is unavailable."""
        try:
            await self._journal.leave_turn(session.session_id, turn.request.turn_id)
        except JournalUnavailable as error:
            log.warning(
                "session %s: cannot leave its turn to other routers yet: %s",
                session.session_id,
                error.message,
                extra=turn.log_fields,
            )
            self._background.start(self._leave_open_later(turn, session))
        except (SessionNotFound, SessionReleased):
            pass

    async def _leave_open_later(self, turn: LiveTurn, session: Session) -> None:
        await asyncio.sleep(RETRY_S)
        if not self._live.closing and not self._live.has(turn.request.tenant, turn.request.turn_id):
            await self._leave_open(turn, session)
