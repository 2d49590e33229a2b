"""What a generation hands over to the next one arrives as it was, secrets and keys among it."""

from __future__ import annotations

from pathlib import Path

from cluster.authority import Authority
from cluster.config import Config
from cluster.ray_backend.cluster import Charge
from cluster.ray_backend.inherited import Inherited
from cluster.ray_backend.succession import CHARGE
from holdfast.processes import NodeProcess
from router.fleet.link import WorkerAddress

SETTINGS = {"workers": 3, "api_key": ["a-secret"], "journal_url": "redis://:password@127.0.0.1:6379/0"}


def test_a_charge_is_the_same_after_its_way_to_the_next_generation() -> None:
    ranks = tuple(NodeProcess(pid, 1234.5678901234567 + pid, "node") for pid in (7, 8))
    charge = Charge(
        Config(**SETTINGS),
        "node",
        Path("/dev/shm/folder"),
        Authority().sealed(),
        before=Config(page_size=4),
        ports=((8000, 50051),),
        inherited=(Inherited(WorkerAddress("worker-0", 5, "127.0.0.1:1", 64), ranks, has_room=True),),
    )
    arrived = CHARGE.validate_json(CHARGE.dump_json(charge))
    assert arrived == charge and arrived.config.api_key == ["a-secret"]
    assert Authority.unsealed(arrived.authority).issue("rank").name == charge.authority.name  # type: ignore[arg-type, union-attr]
