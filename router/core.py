"""The parts of one router, wired together. The APIs are built on it, and the tests drive it."""

from __future__ import annotations

from router.access.audit_log import AuditLog
from router.access.keys import Keyring
from router.batches.files import Files
from router.batches.store import Batches
from router.config import RouterConfig
from router.control_plane import ControlPlane
from router.fleet.fleet import Fleet
from router.fleet.homes import Homes
from router.fleet.migration import Migrator
from router.fleet.placement import Placement
from router.fleet.sweeper import Sweeper
from router.formats.style import AnswerStyle
from router.inputs import InputEncoder
from router.journal.interface import Journal
from router.metrics import Metrics
from router.text import TextCodec
from router.tracing import start_tracing
from router.turns.control import Control
from router.turns.dispatch import Dispatch
from router.turns.gateway import Gateway
from router.turns.live import LiveTurns
from router.turns.relay import Relay
from router.turns.sessions import Sessions


class RouterCore:
    """One router without its servers."""

    def __init__(
        self, config: RouterConfig, journal: Journal, codec: TextCodec, metrics: Metrics, keyring: Keyring
    ) -> None:
        self.config, self.journal, self.codec, self.metrics = config, journal, codec, metrics
        placement = Placement()
        self.tracing = start_tracing(config.otlp_traces_endpoint, config.served_model_name)
        self.keyring, self.audit_log = keyring, AuditLog(config.audit_log)
        self.live = LiveTurns(config, self.keyring, metrics)
        self.sessions = Sessions(journal, config.max_queued_turns_per_session, config.token_timeout_s)
        self.sweeper = Sweeper(journal, config.control_timeout_s)
        self.homes = Homes(journal)
        self.fleet = Fleet(config.worker_lease_s, placement, self.homes, self.sweeper.sweep)
        self.control_plane = ControlPlane(config.control_plane)
        self.migrator = Migrator(config, self.fleet, journal, self.sweeper, metrics)
        self.inputs = InputEncoder(codec, self.fleet)
        self.files, self.batches = Files(journal), Batches(journal)
        self.style = AnswerStyle(config.tool_call_parser, config.reasoning_parser, codec.chat_template)
        dispatch = Dispatch(
            config, self.fleet, placement, journal, self.migrator, self.sweeper, self.live, keyring, metrics
        )
        relay = Relay(config, self.fleet, journal, codec, self.sessions, dispatch, metrics)
        self.gateway = Gateway(
            config, self.fleet, journal, codec, self.sessions, self.live, relay, metrics, self.tracing
        )
        self.control = Control(config, self.fleet, journal, self.sessions, self.live, self.sweeper)
        metrics.watch(
            lambda: [link.stats for link in self.fleet.alive()],
            lambda: len(self.live),
            lambda: len(self.sessions),
            lambda: self.control_plane.degraded,
        )

    def start(self) -> None:
        """Begin what goes on beside the turns. The journal has been started."""
        self.sweeper.start(self.fleet.alive)
        self.homes.start(self.fleet.alive)

    async def close(self) -> None:
        """Settle the turns that have ended, then close the links."""
        await self.gateway.close()
        await self.control_plane.close()
        await self.sweeper.close()
        await self.homes.close()
        await self.fleet.close()
        self.audit_log.close()
        if self.tracing is not None:
            await self.tracing.close()
