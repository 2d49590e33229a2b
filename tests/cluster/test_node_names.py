"""Which workers are on a node, by the names that an operator uses."""

from __future__ import annotations

from cluster.ray_backend.nodes import workers_on

WORKERS = [
    {"worker_id": "a", "ranks": [{"node": "10.0.0.1/aaaa1111"}, {"node": "10.0.0.2/bbbb2222"}]},
    {"worker_id": "b", "ranks": [{"node": "10.0.0.2/cccc3333"}]},
    {"worker_id": "c", "ranks": [{"node": ""}]},
]


def test_by_address_or_id() -> None:
    assert workers_on(WORKERS, "10.0.0.2") == ["a", "b"]
    assert workers_on(WORKERS, "bbbb2222") == ["a"]
    assert workers_on(WORKERS, "cccc3333f00dfeed") == ["b"], "Ray's whole id"
    assert workers_on(WORKERS, "10.0.0") == workers_on(WORKERS, "") == []
