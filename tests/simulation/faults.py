"""The faults of a run. The seed chooses them, and the times and callbacks at which they are injected."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from router.fleet.migration import DrainReport
from tests.simulation.cluster import Cluster
from tests.simulation.loop import Process
from tests.simulation.network import NOBODY
from tests.simulation.store import FailingSegments

CALLBACKS = (300, 15_000)


class Faults:
    """Strikes ``count`` times, then stops; ``heal`` ends what lasts."""

    def __init__(self, cluster: Cluster, rng: random.Random, count: int) -> None:
        self.cluster, self.rng = cluster, rng
        self._kinds = [
            (self.kill, 5),
            (self.pause, 3),
            (self.cut, 4),
            (self.disk_fails, 1),
            (self.disk_is_slow, 1),
            (self.answers_get_lost, 1),
            (self.network_is_slow, 1),
            (self.drain, 1),
            (self.migrate, 4),
            (self.restart, 1),
        ]
        if cluster.engine_config.kv_store is not None:
            self._kinds.append((self.damage, 6))
        if cluster.stores.have_disks:
            self._kinds += [(self.damage_disk, 4), (self.store_disk_fails, 2)]
        if cluster.has_standby:
            self._kinds += [(self.supervisor_fails, 8), (cluster.next_generation, 3)]
        # Some strike between any two callbacks, the rest at any time.
        self._at_callbacks = sorted(rng.randrange(*CALLBACKS) for _ in range(count // 2))
        self._at_times = sorted(rng.uniform(0.5, 15.0) for _ in range(count - count // 2))
        cluster.loop.on_callback = self._on_callback

    async def run(self) -> None:
        for at in self._at_times:
            await asyncio.sleep(max(0.0, at - self.cluster.loop.time()))
            self.strike()

    def heal(self) -> None:
        self._at_callbacks.clear()
        cluster = self.cluster
        cluster.trace("all faults are healed")
        cluster.network.heal()
        cluster.network.latency_s = (0.0002, 0.002)
        cluster.disk.fails = cluster.disk.loses_answers = 0.0
        cluster.disk.latency_s = (0.0002, 0.002)
        FailingSegments.fails = 0.0
        for process in [*cluster.processes(), *cluster.supervisors]:
            if process.paused:
                process.resume()

    def strike(self) -> None:
        kinds, weights = zip(*self._kinds, strict=True)
        self.cluster.disturbed = True
        # The fault runs in no process: not in the one whose callback it interrupted.
        NOBODY.copy().run(self.rng.choices(kinds, weights)[0])

    def _on_callback(self, count: int) -> None:
        while self._at_callbacks and count >= self._at_callbacks[0]:
            self._at_callbacks.pop(0)
            try:
                self.strike()
            except Exception as error:  # raised here, it would be the end of the callback that it interrupts
                self.cluster.violated(f"a fault failed: {error!r}")

    # ---- the faults ---------------------------------------------------------------------------------

    def kill(self) -> None:
        # The only supervisor is no victim: there is nobody to start another.
        supervisors = self.cluster.supervisors if len(self.cluster.supervisors) > 1 else []
        self.cluster.kill(self.rng.choice([*self.cluster.processes(), *supervisors]))

    def damage(self) -> None:
        self.cluster.stores.damage()

    def damage_disk(self) -> None:
        self.cluster.stores.damage_disk()

    def store_disk_fails(self) -> None:
        FailingSegments.fails = self.rng.choice((0.1, 1.0))
        self.cluster.trace(f"the stores' disks fail: {FailingSegments.fails}")
        self._later(self.rng.uniform(0.2, 3.0), lambda: setattr(FailingSegments, "fails", 0.0))

    def restart(self) -> None:
        self.cluster.trace("everything is killed, and started again")
        self.cluster.restart()

    def pause(self) -> None:
        process = self.rng.choice([*self.cluster.processes(), *self.cluster.supervisors])
        self._stop(process, self.rng.choice((0.3, 1.0, 3.0, 4.5, 5.0, 6.0, 9.0)))

    def _stop(self, process: Process, seconds: float) -> None:
        if not process.paused and process.alive:
            self.cluster.trace(f"{process.name} stops for {seconds} s")
            self.cluster.held_up = True
            process.pause()
            self._later(seconds, lambda: self._wake(process))

    def supervisor_fails(self) -> None:
        """Kill one, or stop it for longer than its lease."""
        process = self.rng.choice(self.cluster.supervisors)
        if self.rng.random() < 0.4:
            self.cluster.kill(process)
        else:
            self._stop(process, self.rng.choice((2.0, 6.0, 9.0)))

    def _wake(self, process: Process) -> None:
        if process.paused and process.alive:
            self.cluster.trace(f"{process.name} wakes")
            process.resume()

    def cut(self) -> None:
        hosts = [router.host for router in self.cluster.routers]
        ranks = [process.host for process in self.cluster.ranks()]
        if not ranks:  # each worker waits for its next incarnation
            return
        supervisors = [process.host for process in self.cluster.supervisors]
        one, other = self.rng.choice([*hosts, *ranks, *supervisors]), self.rng.choice(ranks)
        ways = self.rng.choice(([(one, other)], [(other, one)], [(one, other), (other, one)]))
        self.cluster.held_up = True
        for source, target in ways:
            self.cluster.trace(f"nothing gets from {source} to {target}")
            self.cluster.network.cut(source, target)
        self._later(self.rng.choice((0.3, 1.0, 3.0, 6.0)), self._heal_network)

    def _heal_network(self) -> None:
        self.cluster.trace("the network is whole")
        self.cluster.network.heal()

    def disk_fails(self) -> None:
        self._disk("fails", self.rng.choice((0.05, 0.5, 1.0)), 0.0)

    def answers_get_lost(self) -> None:
        self._disk("loses_answers", self.rng.choice((0.05, 0.5)), 0.0)

    def disk_is_slow(self) -> None:
        self._disk("latency_s", (0.01, self.rng.choice((0.1, 1.0))), (0.0002, 0.002))

    def _disk(self, name: str, value: object, usual: object) -> None:
        self.cluster.trace(f"disk: {name} is {value}")
        setattr(self.cluster.disk, name, value)
        self._later(self.rng.uniform(0.2, 3.0), lambda: setattr(self.cluster.disk, name, usual))

    def network_is_slow(self) -> None:
        self.cluster.trace("the network is slow")
        self.cluster.network.latency_s = (0.001, self.rng.choice((0.1, 0.5)))
        self._later(self.rng.uniform(0.2, 3.0), lambda: setattr(self.cluster.network, "latency_s", (0.0002, 0.002)))

    def drain(self) -> None:
        """A worker is drained, and replaced by its next incarnation some time after."""
        worker = self.rng.choice(self.cluster.workers)
        router = self.rng.choice(self.cluster.routers)
        if router.core is None or not router.process.alive or worker.address is None:
            return
        self.cluster.trace(f"{worker.name} is drained")
        core, timeout_s, rank = router.core, self.rng.choice((0.0, 1.0)), worker.ranks[0]

        async def drain() -> None:
            try:
                source = core.fleet.worker(worker.name)
                before = await core.migrator.pins(source)
                report = await core.migrator.drain(worker.name, timeout_s)
                left = [pin for pin in await core.migrator.pins(source) if pin in before and worker.has_kv(pin[0])]
                if len(left) > report["sessions_left"]:
                    self.cluster.violated(f"{worker.name} was ended before its sessions had moved: {left}, {report}")
            except Exception as error:
                self.cluster.trace(f"the drain failed: {error!r}")
            self.cluster.kill(rank)

        router.process.spawn(drain())
        self._later(8.0, lambda: self.cluster.kill(rank))

    def migrate(self) -> None:
        """Migrate all idle sessions of a worker to the other, one by one."""
        router = self.rng.choice(self.cluster.routers)
        core = router.core
        if core is None or not router.process.alive:
            return
        source, target = self.rng.sample(self.cluster.workers, 2)

        async def migrate() -> None:
            links = {link.address.worker_id: link for link in core.fleet.alive()}
            if len(links) < 2:
                return
            sender, receiver, report = links[source.name], links[target.name], DrainReport()
            try:
                for session_id, epoch in await core.migrator.pins(sender):
                    await core.migrator.migrate(session_id, epoch, sender, receiver, report)
            except Exception as error:
                self.cluster.trace(f"the migration failed: {error!r}")
            core.sweeper.sweep(sender)
            self.cluster.trace(f"migrated from {sender.name} to {receiver.name}: {report}")
            self.cluster.sessions_migrated += report.sessions_migrated

        router.process.spawn(migrate())

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self.cluster.loop.call_later(seconds, act, context=NOBODY.copy())
