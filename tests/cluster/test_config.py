"""One configuration: a file, flags over it, and errors that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli.main import cli
from cluster.config import SECRETS, Config, load_config
from holdfast.errors import ConfigError


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("workers: 3\npage-size: 32\n")
    config = load_config(file, {"workers": 1})
    assert (config.workers, config.page_size, config.port) == (1, 32, 8000)
    assert config.engine().page_size == 32


def test_a_switch_is_a_flag_with_an_opposite(tmp_path: Path) -> None:
    assert not load_config(None, {}).engine().expert_parallel
    assert load_config(None, {"ep": True}).engine().expert_parallel
    text = CliRunner().invoke(cli, ["serve", "--help"]).output
    assert "--ep / --no-ep" in text


def test_overlap_is_by_device_unless_it_is_said() -> None:
    given = [load_config(None, flags).engine().overlap_schedule for flags in ({}, {"disable_overlap_schedule": True})]
    assert given == [None, False]
    assert load_config(None, {"disable_overlap_schedule": False}).engine().overlap_schedule
    assert "--disable-overlap-schedule / --no-disable" in CliRunner().invoke(cli, ["serve", "--help"]).output


def test_a_draft_model_is_named_from_where_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "small"}
    engine = load_config(None, flags).engine()
    assert (engine.speculative_algorithm, engine.speculative_draft_model_path) == ("STANDALONE", tmp_path / "small")
    assert load_config(None, {}).engine().speculative_algorithm == "NONE"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("worker: 3", "unknown key 'worker'; the nearest valid key is 'workers'"),
        ("page_sise: 3", "'page_size'"),
        ("workers: many", "workers: "),
        ("device: tpu", "device: "),
        ("port: 70000", "port: "),
        ("swa_full_tokens_ratio: 2", "swa_full_tokens_ratio: "),
        ("mem_fraction_static: 1", "mem_fraction_static: "),
        ("resume_points: -1", "resume_points: "),
        ("- a list", "must contain keys and values"),
        ("a: [", "not valid YAML"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    assert named in caught.value.message


def test_wrong_page_size_and_limits() -> None:
    for bad in ({"page_size": 3}, {"page_size": 512}, {"max_sessions": 2}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Config(**bad).engine()


def test_every_key_is_a_flag() -> None:
    text = CliRunner().invoke(cli, ["serve", "--help"]).output
    for key in Config.model_fields.keys() - SECRETS:
        assert f"--{key.replace('_', '-')}" in text


def test_commands_say_when_no_router_answers() -> None:
    result = CliRunner().invoke(cli, ["status", "--url", "http://127.0.0.1:9"])
    assert "no router answers" in str(result.exception)
