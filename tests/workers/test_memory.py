"""How KV memory is divided among a model's groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.errors import ConfigError
from tests.parity.checkpoints import make_checkpoint
from tests.workers.engine import Engine
from workers.config import EngineConfig
from workers.engine.memory import group_specs, pages_by_group, step_tokens
from workers.models import ModelConfig, read_config
from workers.models.kv_pool import page_sizes_bytes

CPU = torch.device("cpu")
CONFIG = EngineConfig(max_running_requests=2, chunked_prefill_size=64)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt-oss")
    make_checkpoint("gpt-oss", folder)
    return folder


def divided(config: EngineConfig, model: ModelConfig) -> dict[str, int]:
    specs = group_specs(model, pages_by_group(config, model, torch.float32, CPU))
    return {spec.name: spec.num_pages for spec in specs}


def test_a_ratio_sets_the_windows_share(gpt_oss: Path) -> None:
    config = replace(CONFIG, max_total_tokens=16_000, swa_full_tokens_ratio=0.25)
    assert divided(config, read_config(gpt_oss)) == {"window 9": 250, "full": 1000}


def test_a_fraction_of_a_gpu_is_for_weights_and_kv(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, gpu, total = read_config(gpt_oss), torch.device("cuda"), 80 * 2**20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - 20 * 2**20, total))
    sizes = page_sizes_bytes(model, CONFIG.page_size, torch.float32)

    def kv_bytes(fraction: float | None) -> int:
        pages = pages_by_group(replace(CONFIG, mem_fraction_static=fraction), model, torch.float32, gpu)
        return sum(num * size for num, size in zip(pages, sizes, strict=True))

    slack = 2 * sum(sizes)  # less than another page of each group
    for fraction, expected in ((None, 0.85 * 60), (0.9, 0.9 * 80 - 20), (0.5, 0.5 * 80 - 20)):
        assert 0 <= expected * 2**20 - kv_bytes(fraction) < slack
    with pytest.raises(ConfigError, match=r"^mem_fraction_static: 0.25 of the GPU's 0.1 GB leaves nothing for KV"):
        kv_bytes(0.25)
    with pytest.raises(ConfigError, match=r"^mem_fraction_static: is of a GPU's memory"):
        divided(replace(CONFIG, mem_fraction_static=0.9), model)


def test_a_ratio_that_leaves_less_than_a_turn_needs_is_refused(gpt_oss: Path) -> None:
    config = replace(CONFIG, max_total_tokens=16_000, swa_full_tokens_ratio=0.01)
    with pytest.raises(ConfigError, match=r"^swa_full_tokens_ratio: 0.01 leaves 10 pages .* a turn needs 12"):
        divided(config, read_config(gpt_oss))


def test_by_default_windows_get_what_idle_sessions_and_a_batch_need(gpt_oss: Path) -> None:
    model = read_config(gpt_oss)
    pages = divided(replace(CONFIG, max_total_tokens=160_000), model)
    assert pages["full"] == 10_000 and 100 < pages["window 9"] < 200
    more = divided(replace(CONFIG, max_total_tokens=160_000, resume_points=3), model)
    assert pages["window 9"] < more["window 9"] < 2.5 * pages["window 9"], "each resume point is a window"
    few = divided(replace(CONFIG, max_total_tokens=64, max_running_requests=32), model)
    assert few == {"window 9": 4, "full": 4}, "never more than every token needs"


def test_free_memory_is_divided_by_the_groups_sizes(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_config(gpt_oss)
    free = 50_000_000
    monkeypatch.setattr("workers.engine.memory.psutil.virtual_memory", lambda: type("Memory", (), {"available": free}))
    pages, sizes = divided(CONFIG, model), page_sizes_bytes(model, CONFIG.page_size, torch.float32)
    used = sum(pages[name] * size for name, size in zip(("window 9", "full"), sizes, strict=True))
    assert 0.9 * 0.2 * free < used <= 0.2 * free


def test_a_draft_models_kv_is_part_of_the_pages_that_hold_it(
    gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama", tmp_path)
    model, draft, free = read_config(gpt_oss), read_config(tmp_path), 50_000_000
    monkeypatch.setattr("workers.engine.memory.psutil.virtual_memory", lambda: type("Memory", (), {"available": free}))
    alone, beside = (pages_by_group(CONFIG, model, torch.float32, CPU, which) for which in (None, draft))
    window, full = page_sizes_bytes(model, CONFIG.page_size, torch.float32)
    full += sum(page_sizes_bytes(draft, CONFIG.page_size, torch.float32))
    assert beside[1] < alone[1] and 0.9 * 0.2 * free < beside[0] * window + beside[1] * full <= 0.2 * free


def test_a_model_with_one_group_gives_it_everything(tmp_path: Path) -> None:
    make_checkpoint("mistral-window", tmp_path)
    assert divided(replace(CONFIG, max_total_tokens=320), read_config(tmp_path)) == {"window 11": 20}


def test_an_engine_holds_windows_while_it_prefills(gpt_oss: Path) -> None:
    (gpt_oss / "tokenizer.json").write_bytes((CONFIG.model / "tokenizer.json").read_bytes())
    config = replace(CONFIG, model=gpt_oss, page_size=4, max_total_tokens=256, chunked_prefill_size=16)
    engine = Engine(config, swa_full_tokens_ratio=0.35)
    window, full = engine.cache.groups
    assert (window.pool.num_pages, full.pool.num_pages) == (22, 64)
    assert len(engine.generate("s", [7 + i % 90 for i in range(230)])) == 12, (
        "it does not fit whole in the window group"
    )


@pytest.mark.parametrize(("gib", "tokens"), [(80, 8192), (24, 2048)])
def test_a_step_is_as_large_as_its_device(monkeypatch: pytest.MonkeyPatch, gib: int, tokens: int) -> None:
    properties = type("Properties", (), {"total_memory": gib * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert step_tokens(EngineConfig(), torch.device("cuda")) == tokens
    assert step_tokens(EngineConfig(), CPU) == 512
    assert step_tokens(EngineConfig(chunked_prefill_size=100), torch.device("cuda")) == 100
