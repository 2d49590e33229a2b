"""The compiled kernels of a CPU: equal to torch's, operation by operation. (tests/parity runs whole models.)"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from tests.workers.kernels.test_paged_attention import CASES, KINDS, NUM_PAGES, tables_of
from workers.kernels.backend import load_backend
from workers.kernels.cpu import library
from workers.kernels.cpu.memory import ALIGNMENT, CHUNK, HugePages
from workers.kernels.cpu.operations import CpuElementwise, CpuExperts, CpuPlan, CpuProducts
from workers.kernels.cpu.tape import StepArrays, Tape
from workers.kernels.elementwise import HeadNorms, Places, Rotation, TorchElementwise
from workers.kernels.fp8 import FP8, read, stored
from workers.kernels.grouped_experts import ExpertProducts, RouterSpec, TorchExperts
from workers.kernels.paged_attention import paged_attention_reference

T = TypeVar("T")
CPU = torch.device("cpu")
TORCH = TorchElementwise()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if library.load_library() is None:
        pytest.skip("no C++ compiler")


def new_tape(dtype: torch.dtype) -> Tape:
    kernels = library.load_library()
    assert kernels is not None
    return Tape(kernels, dtype, 2)


def computed(
    dtype: torch.dtype, act: Callable[[Tape], T], starts: Sequence[int] = (0,), counts: Sequence[int] = (1,)
) -> T:
    """What ``act`` records, after a step of sequences that have ``starts`` tokens and compute ``counts``."""
    tape = new_tape(dtype)
    with tape.recording(sum(counts)):
        result = act(tape)
    tokens, rows = array("i", bytes(4 * sum(counts))), array("i", range(len(counts)))
    tape.run(StepArrays(tokens, rows, array("i", starts), array("i", counts), array("i")))
    return result


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    exact = got.dtype is torch.float32
    torch.testing.assert_close(got, expected, atol=scale * (2e-6 if exact else 0.02), rtol=2e-5 if exact else 0.01)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 60),
    n=st.integers(1, 90),
    k=st.integers(1, 1100),
    dtype=DTYPES,
    weights=DTYPES,
    biased=st.booleans(),
    part=st.booleans(),
)
def test_products(
    rows: int, n: int, k: int, dtype: torch.dtype, weights: torch.dtype, biased: bool, part: bool
) -> None:
    x, weight = randn(rows, 2 * k, dtype=dtype), randn(n, k, dtype=weights, seed=2)
    x = x[:, k:] if part else x[:, :k].contiguous()  # a part of a wider row, as splits of a product are
    bias = randn(n, dtype=dtype, seed=3) if biased else None

    prepared = CpuProducts(new_tape(dtype)).prepare(weight)
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    got = computed(dtype, lambda tape: CpuProducts(tape).linear(x, prepared, bias), counts=[rows])
    close(got, expected.to(dtype), scale=k**0.5)
    wide = computed(dtype, lambda tape: CpuProducts(tape).scores(x, prepared, bias), counts=[rows])
    close(wide, expected.float(), scale=k**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_round_each_row_by_itself(dtype: torch.dtype) -> None:
    x, weight = randn(9, 70, dtype=dtype), randn(40, 70, seed=2) * torch.logspace(-6, 3, 40)[:, None]
    prepared = CpuProducts(new_tape(dtype), "int8").prepare(weight)
    got = computed(dtype, lambda tape: CpuProducts(tape).scores(x, prepared, None), counts=[9])
    scales = weight.abs().amax(-1, keepdim=True) / 127
    rounded = (weight / scales).round() * scales
    torch.testing.assert_close(got, (x.double() @ rounded.double().T).float(), atol=1e-4, rtol=1e-4)
    zero = CpuProducts(new_tape(dtype), "int8").prepare(torch.zeros(3, 4))
    assert not computed(dtype, lambda tape: CpuProducts(tape).linear(x[:, :4], zero), counts=[9]).any()


def test_products_by_head() -> None:
    x, weight = randn(5, 3, 20)[..., :14], randn(3, 33, 14, seed=2)
    prepared = CpuProducts(new_tape(torch.float32)).prepare(weight)
    got = computed(torch.float32, lambda tape: CpuProducts(tape).by_head(x, prepared), counts=[5])
    close(got, torch.einsum("thk,hnk->thn", x, weight), scale=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_attention(case: str, kind: str, page_size: int, dtype: torch.dtype) -> None:
    query_lens, context_lens = CASES[case]
    options, dim, kv_heads = dict(KINDS[kind]), 24, 2
    of_q = torch.float32 if dtype is FP8 else dtype
    k, v = (randn(NUM_PAGES, kv_heads, page_size, dim, seed=i).to(dtype) for i in (1, 2))
    q = randn(sum(query_lens), 4, dim, dtype=of_q, seed=3)
    tables = tables_of(len(query_lens), torch.Generator().manual_seed(1))
    sinks = options.pop("sinks", None)
    sinks = None if sinks is None else sinks.to(of_q)
    expected = paged_attention_reference(q, k, v, tables, query_lens, context_lens, 0.3, sinks=sinks, **options)
    window = options.pop("window", 0)
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        # What no query's window reaches may be freed, and hold anything.
        first = max(0, context_len - query_len - window + 1) // page_size if window else 0
        tables[row, :first] = NUM_PAGES - 1
    k[-1], v[-1] = torch.nan, torch.nan

    def record(tape: Tape) -> torch.Tensor:
        return CpuPlan(tape, tables, page_size, window).attend(q, k, v, 0.3, sinks=sinks, v_scale=2.0, **options)

    starts = [context - query for context, query in zip(context_lens, query_lens, strict=True)]
    close(computed(of_q, record, starts, query_lens), expected * 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_and_latents(dtype: torch.dtype) -> None:
    """Several blocks of keys, several tiles of queries; values are the first part of the keys."""
    query_lens, context_lens = [70, 1], [150, 200]
    k, q = randn(NUM_PAGES, 1, 16, 48, dtype=dtype), randn(71, 6, 48, dtype=dtype, seed=2)
    tables = tables_of(2, torch.Generator().manual_seed(1))
    expected = paged_attention_reference(q, k, k[..., :40], tables, query_lens, context_lens, 0.2)

    def record(tape: Tape) -> torch.Tensor:
        return CpuPlan(tape, tables, 16, 0).attend(q, k, None, 0.2, v_dim=40)

    close(computed(dtype, record, [80, 199], query_lens), expected)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), size=st.integers(1, 600), dtype=DTYPES, adds=st.booleans(), wide=st.booleans())
def test_add_norm(rows: int, size: int, dtype: torch.dtype, adds: bool, wide: bool) -> None:
    x, delta = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype, seed=2) if adds else None
    weight = randn(size, dtype=torch.float32 if wide else dtype, seed=3)
    got = computed(dtype, lambda tape: CpuElementwise(tape).add_norm(x, delta, weight, 1e-5), counts=[rows])
    for one, other in zip(got, TORCH.add_norm(x, delta, weight, 1e-5), strict=True):
        close(one, other, scale=4)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 5),
    half_dim=st.integers(1, 40),
    part=st.floats(0.1, 1.0),
    kv=st.sampled_from(["as it is", "fp8"]),
    dtype=DTYPES,
    norms=st.booleans(),
)
def test_queries_are_rotated_and_kv_is_written(
    tokens: int, half_dim: int, part: float, kv: str, dtype: torch.dtype, norms: bool
) -> None:
    dim, rope, kv_heads = 2 * half_dim, 2 * max(1, int(part * half_dim)), 2
    both = randn(tokens, (3 + 2 * kv_heads) * dim, dtype=dtype)  # one product, as the models have it
    q, k, v = both.split([3 * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    shaped = (q.view(tokens, 3, dim), k.view(tokens, kv_heads, dim), v.view(tokens, kv_heads, dim))
    rotation = Rotation(randn(tokens, 1, rope, dtype=dtype, seed=2), randn(tokens, 1, rope, dtype=dtype, seed=3))
    given_norms = HeadNorms(randn(dim, dtype=dtype, seed=4), randn(dim, dtype=dtype, seed=5), 1e-6) if norms else None
    at, offsets = torch.tensor([5, 3, 0, 1, 6][:tokens]), torch.arange(tokens) % 4
    stored_as = FP8 if kv == "fp8" else dtype
    places = [
        Places(*(torch.zeros(7, kv_heads, 4, dim).to(stored_as) for _ in range(2)), at, offsets, (0.5, 2.0))
        for _ in range(2)
    ]
    if kv == "as it is":
        places = [Places(p.k_pages, p.v_pages, at, offsets) for p in places]
    got = computed(
        dtype,
        lambda tape: CpuElementwise(tape).rotate_and_write(*shaped, given_norms, rotation, places[0]),
        counts=[tokens],
    )
    close(got, TORCH.rotate_and_write(*shaped, given_norms, rotation, places[1]), scale=4)
    mine, reference = ([p.k_pages, p.v_pages] for p in places)
    for one, other in zip(mine, reference, strict=True):
        assert one is not None and other is not None
        if kv == "fp8":
            # Keys are computed first: a last bit may turn a tie.
            assert (stored(one) != stored(other)).float().mean() < 0.02
            assert torch.equal(stored(mine[1]), stored(reference[1])), "values are scaled and rounded"
        else:
            close(one, other, scale=4)


def test_every_fp8_value_is_written_and_read_as_it_is() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    values = codes.float()[codes.float().isfinite()]
    x = torch.cat((values, torch.tensor([1e9, -1e9, 0.0009, 448.1, 464.0, 17.0, 19.0])))
    pages = torch.zeros(1, 1, 1, len(x)).to(FP8)
    places = Places(pages, torch.zeros_like(pages), torch.tensor([0]), torch.tensor([0]))
    rows = x.view(1, 1, -1)
    zeros = torch.zeros(1, 1, 2)
    rotation = Rotation(zeros + 1.0, zeros)
    computed(
        torch.float32, lambda tape: CpuElementwise(tape).rotate_and_write(rows, rows, rows, None, rotation, places)
    )
    assert torch.equal(read(stored(pages), pages, torch.float32).flatten(), x.clamp(-448, 448).to(FP8).float())


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_activations(activation: str) -> None:
    gate_up = randn(9, 2 * 37) * 5
    got = computed(torch.float32, lambda tape: CpuElementwise(tape).gated(gate_up, activation), counts=[9])
    close(got, TORCH.gated(gate_up, activation), scale=10)


@pytest.mark.parametrize(
    "spec",
    [
        RouterSpec(8, 2, "top_softmax"),
        RouterSpec(8, 3, normalize=True),
        RouterSpec(8, 3, num_groups=4, top_groups=2, scale=2.5),
        RouterSpec(8, 2, "sigmoid", normalize=True, num_groups=2, top_groups=1, group_by_two=True, choice_bias=True),
    ],
    ids=["of the chosen", "softmax", "groups", "sigmoid"],
)
def test_routing(spec: RouterSpec) -> None:
    logits = randn(50, 8)
    bias = randn(8, seed=2) if spec.choice_bias else None
    chosen, weights = computed(
        torch.float32, lambda tape: CpuExperts(tape).route(logits, bias, spec, torch.float32), counts=[50]
    )
    expected, expected_weights = TorchExperts().route(logits, bias, spec, torch.float32)
    assert torch.equal(chosen.long(), expected)
    close(weights, expected_weights)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("clamped", [False, True])
def test_experts(clamped: bool, first: int) -> None:
    def experts(prepare: Callable[[torch.Tensor], object]) -> ExpertProducts:
        given = prepare(randn(3, 48, 20) * 0.2), randn(3, 48, seed=2), prepare(randn(3, 20, 24, seed=3)), randn(3, 20)
        return ExpertProducts(*given, first=first, num_experts=6, clamped=clamped, limit=0.4, alpha=1.7)  # type: ignore[arg-type]

    x = randn(40, 20, seed=5)
    chosen = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:2] for i in range(40)])
    weights, mine = randn(40, 2, seed=6), experts(CpuProducts(new_tape(torch.float32)).prepare)
    numbers = chosen.int()
    got = computed(torch.float32, lambda tape: CpuExperts(tape).run(x, numbers, weights, mine), counts=[40])
    close(got, TorchExperts().run(x, chosen, weights, experts(lambda weight: weight)), scale=10)


# ---- the tape ----------------------------------------------------------------------------------------


def test_a_tape_refuses_what_would_be_computed_once() -> None:
    with pytest.raises(TypeError, match="a tape cannot record add"):
        computed(torch.float32, lambda tape: torch.add(tape.empty(1, 4), 1))
    with pytest.raises(TypeError, match="a tape cannot record contiguous"):
        computed(torch.float32, lambda tape: tape.empty(1, 4, 2).transpose(1, 2).contiguous())


def test_a_buffer_is_another_tensor_s_once_no_view_is_left() -> None:
    tape = new_tape(torch.float32)
    with tape.recording(64):
        first = tape.empty(64, 8)
        view, place = first.view(64, 2, 4), first.data_ptr()
        del first
        second = tape.empty(64, 8)
        assert second.data_ptr() != place
        del view
        assert tape.empty(64, 8).data_ptr() == place


def test_a_call_comes_between_two_operations() -> None:
    x, weight, seen = randn(3, 8), torch.ones(8), []

    def record(tape: Tape) -> torch.Tensor:
        out = CpuElementwise(tape).norm(x, weight, 1e-6)
        tape.call(lambda count: seen.append((count, out.clone())))
        return CpuElementwise(tape).norm(out, weight, 1e-6)

    computed(torch.float32, record, counts=[3])
    assert seen[0][0] == 3
    close(seen[0][1], TORCH.norm(x, weight, 1e-6), scale=4)


# ---- which kernels an engine has ---------------------------------------------------------------------


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(library, "COMPILERS", ("no-such-compiler",))
    library.load_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert load_backend("auto", CPU).tape is None
        assert len(caplog.records) == 1 and "no C++ compiler" in caplog.text
        with pytest.raises(ConfigError, match=r"cpu needs a C\+\+20 compiler"):
            load_backend("cpu", CPU)
        with pytest.raises(ConfigError, match="int8 is for the kernels of a CPU"):
            load_backend("auto", CPU, quantization="int8")
    finally:
        library.load_library.cache_clear()


def test_a_compiler_that_fails_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\necho it is out of order >&2; test "$1" = --version\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(library, "COMPILERS", (str(compiler),))
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    library.load_library.cache_clear()
    try:
        assert library.load_library() is None
        assert "out of order" in caplog.text
        assert not list((tmp_path / "cache").glob("*.so")), "nothing is left behind"
    finally:
        library.load_library.cache_clear()


def test_compiled_kernels_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not the compiler's work, which takes seconds, but that it is not asked twice."""
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    script = f'#!/bin/sh\necho "$1" >> {calls}\nfor last; do :; done\ntest "$1" = --version || echo built > "$last"\n'
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    paths = {library._compiled(str(compiler)) for _ in range(2)}
    assert len(paths) == 1 and paths.pop().read_text() == "built\n"
    assert calls.read_text().count("-std=c++20") == 1


def test_settings_that_no_kernels_have() -> None:
    with pytest.raises(ConfigError, match="quantization: 'int3' is not one of int8"):
        load_backend("auto", CPU, quantization="int3")
    with pytest.raises(ConfigError, match="float32 or bfloat16"):
        load_backend("cpu", CPU, dtype=torch.float16)
    assert load_backend("auto", CPU, dtype=torch.float16).tape is None


def test_memory_of_weights_is_handed_out_once_and_outlives_what_handed_it_out() -> None:
    memory = HugePages()
    sizes = [1, 63, 64, 65, CHUNK // 2, CHUNK // 2, CHUNK + 1, 7]
    tensors = [memory.empty(1, size) for size in sizes]
    del memory
    for i, tensor in enumerate(tensors):
        assert tensor.data_ptr() % ALIGNMENT == 0 and not tensor.any()
        tensor.fill_(i + 1)
    assert [int(tensor.min()) for tensor in tensors] == [i + 1 for i in range(len(sizes))], "no two overlap"
