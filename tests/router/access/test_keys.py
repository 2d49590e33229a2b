"""API keys: what is kept of them, how a router takes changes over, how fast a tenant may go."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli.main import cli
from cluster.config import load_config
from holdfast.errors import ConfigError, Unauthenticated
from router.access import keys
from router.access.keys import Keyring, Limits, StoredKey, given_key, new_key, read_keys, write_keys
from router.access.rates import TokenRates


@pytest.fixture(autouse=True)
def looks_at_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "RELOAD_S", 0.0)


def test_nothing_kept_of_a_key_lets_anybody_in(tmp_path: Path) -> None:
    key, stored = new_key("acme", ["user"])
    write_keys(tmp_path / "keys", [stored])
    kept = (tmp_path / "keys").read_text()
    assert key not in kept and stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o600
    ring = Keyring(file=tmp_path / "keys")
    assert ring.identify(f"Bearer {key}").tenant == ring.identify(key).tenant == "acme"
    for wrong in (None, "", "Bearer ", stored.sha256, stored.key_id, key[:-1], key.lower()):
        with pytest.raises(Unauthenticated):
            ring.identify(wrong)


def test_a_changed_file_is_taken_over_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    (first, one), (second, two) = new_key("a"), new_key("b", ["operator"])
    write_keys(path, [one])
    ring = Keyring(file=path)
    assert ring.num_tenants == 1
    write_keys(path, [one, two])
    assert ring.identify(second).roles == {"operator"} and ring.num_tenants == 2
    path.write_text("{")
    assert ring.identify(first).tenant == "a", "what was there stays"
    write_keys(path, [two])
    with pytest.raises(Unauthenticated):
        ring.identify(first)


def test_a_key_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, stored = new_key("a", expires_at=1000.0)
    ring = Keyring([stored])
    monkeypatch.setattr(keys.time, "time", lambda: 999.0)
    assert ring.identify(key).tenant == "a"
    monkeypatch.setattr(keys.time, "time", lambda: 1000.0)
    with pytest.raises(Unauthenticated):
        ring.identify(key)


def test_a_tenants_limits_are_the_least_of_its_keys() -> None:
    kept = [new_key("a", limits=Limits(max_turns=n, tokens_per_min=t))[1] for n, t in ((3, None), (5, 100), (None, 90))]
    ring = Keyring(kept)
    assert ring.limits_of("a") == Limits(max_turns=3, tokens_per_min=90) and ring.limits_of("b") == Limits()


def test_tenants_of_a_share_group_have_one_scope_and_its_least_share(tmp_path: Path) -> None:
    kept = [
        new_key(tenant, limits=Limits(kv_share=share), share_group=group)[1]
        for tenant, share, group in (("a", 0.5, "g"), ("b", 0.25, "g"), ("c", 0.1, None), ("d", None, None))
    ]
    ring = Keyring(kept)
    scopes = [(ring.scope_of(name).name, ring.scope_of(name).share_ppm) for name in "abcde"]
    assert scopes == [("group:g", 250_000), ("group:g", 250_000), ("c", 100_000), ("d", 0), ("e", 0)]
    write_keys(tmp_path / "keys", [*kept, new_key("a")[1]])
    with pytest.raises(ConfigError, match="share_group: the keys of tenant a"):
        Keyring(file=tmp_path / "keys")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "Invalid JSON"),
        ('{"keys": [{"key_id": "x"}]}', "keys.0.sha256"),
        ('{"keys": [], "more": 1}', "more"),
        (json.dumps({"keys": [given_key("x").model_dump(mode="json") | {"tenant": "a/b"}]}), "keys.0.tenant"),
        (json.dumps({"keys": [given_key("x").model_dump(mode="json") | {"roles": ["god"]}]}), "keys.0.roles"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=f"api_key_file: .*{message}"):
        Keyring(file=tmp_path / "keys")


def test_no_file_has_no_keys_and_lets_nobody_in(tmp_path: Path) -> None:
    ring = Keyring(file=tmp_path / "none")
    assert not ring.is_open and read_keys(tmp_path / "none") == []
    with pytest.raises(Unauthenticated):
        ring.identify("anything")


def test_a_tenant_waits_until_what_it_owes_is_paid() -> None:
    rates = TokenRates()
    assert rates.wait_s("a", 60, 0.0) == 0
    rates.spend("a", 100, 60, 0.0)
    assert rates.wait_s("a", 60, 0.0) == 41 and rates.wait_s("b", 60, 0.0) == 0
    assert rates.wait_s("a", 60, 30.0) == 11 and rates.wait_s("a", 60, 41.0) == 0
    rates.spend("a", 60, 60, 1000.0)
    assert rates.wait_s("a", 60, 1000.0) == 1, "a bucket holds a minute's tokens, however long nothing came"


def run(*words: str, **environment: str) -> str:
    result = CliRunner().invoke(cli, words, env=environment, catch_exceptions=True)
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output.strip()


def test_the_command_line_makes_shows_and_revokes_keys(tmp_path: Path) -> None:
    file, log = str(tmp_path / "keys"), str(tmp_path / "log")
    where = {"HOLDFAST_API_KEY_FILE": file, "HOLDFAST_AUDIT_LOG": log}
    shared = ("--kv-share", "0.25", "--share-group", "partners")
    mine = run("keys", "create", "--tenant", "acme", "--max-turns", "3", "--days", "2", *shared, **where)
    boss = run("keys", "create", "--tenant", "ops", "--role", "operator", "--role", "metrics", **where)
    ring = Keyring(file=Path(file))
    assert ring.identify(mine).roles == {"user"} and ring.identify(boss).roles == {"operator", "metrics"}
    rows = json.loads(run("keys", "list", "--json", **where))
    shown = [(row["tenant"], row["max_turns"], row["kv_share"], row["share_group"]) for row in rows]
    assert shown == [("acme", 3, 0.25, "partners"), ("ops", None, None, None)]
    refused = CliRunner().invoke(cli, ["keys", "create", "--tenant", "acme"], env=where)
    assert refused.exit_code and "share_group" in str(refused.exception)
    assert run("keys", "revoke", rows[0]["key_id"], **where) == ""
    with pytest.raises(Unauthenticated):
        ring.identify(mine)
    lines = [json.loads(line) for line in Path(log).read_text().splitlines()]
    assert [(line["action"], line["tenant"]) for line in lines] == [
        ("create key", "acme"),
        ("create key", "ops"),
        ("revoke key", "acme"),
    ]
    everything = Path(file).read_text() + Path(log).read_text()
    assert mine not in everything and boss not in everything
    unknown = CliRunner().invoke(cli, ["keys", "revoke", "nothing"], env=where)
    assert unknown.exit_code and "no key nothing in" in str(unknown.exception)


def test_keys_come_from_the_environment_and_never_from_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_KEYS", "one two")
    monkeypatch.setenv("HOLDFAST_ADMIN_API_KEYS", "three")
    config = load_config(None, {})
    ring = Keyring(config.router().api_keys)
    assert ring.identify("two").roles == {"user"} and "operator" in ring.identify("three").roles
    assert all(secret not in repr(config.router()) for secret in ("'one'", "'two'", "'three'")), "Ray sees no key"
    shown = CliRunner().invoke(cli, ["serve", "--api-key", "one"])
    assert shown.exit_code == 2 and "everybody on this machine can read a command line" in shown.output


def test_a_journals_password_is_on_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "rediss://me:secret@redis.internal:6379/0"
    shown = CliRunner().invoke(cli, ["serve", "--journal-url", url])
    assert shown.exit_code == 2 and "HOLDFAST_JOURNAL_URL" in shown.output and "secret" not in shown.output
    monkeypatch.setenv("HOLDFAST_JOURNAL_URL", url)
    assert load_config(None, {}).journal_url == url
    assert "HOLDFAST_JOURNAL_URL" not in os.environ, "no process inherits it"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_without_keys_only_this_machine_is_served(host: str) -> None:
    with pytest.raises(ConfigError, match=r"host: .* can be reached by others"):
        load_config(None, {"host": host})
    assert load_config(None, {"host": host, "no_auth": True}).host == host
    assert load_config(None, {"host": host, "api_key": ["k"]}).host == host
    for here in ("127.0.0.1", "::1", "localhost"):
        load_config(None, {"host": here})


def test_what_is_kept_has_a_tenant_that_is_a_name() -> None:
    for tenant in ("", "a b", "../x", "a\x1fb", "x" * 65):
        with pytest.raises(ConfigError, match="tenant"):
            new_key(tenant)
    assert isinstance(new_key("team-1.prod_x")[1], StoredKey)
