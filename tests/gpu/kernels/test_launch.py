"""Launch configurations, the rule for splits, files of tuned launches, what is refused; and the references."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the kernels need PyTorch")
pytest.importorskip("triton", reason="the kernels need Triton")

from gpu.kernels import launch as launches  # noqa: E402
from gpu.kernels.block_copy import copy_blocks  # noqa: E402
from gpu.kernels.cache_write import write_kv  # noqa: E402
from gpu.kernels.call import INTERPRETING  # noqa: E402
from gpu.kernels.decode import contiguous_decode, decode_reference, paged_decode  # noqa: E402
from gpu.kernels.launch import (  # noqa: E402
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
    PROGRAMS_PER_SM,
    DecodeLaunch,
    Device,
    PrefillLaunch,
    decode_launch,
    load_tuning,
    num_splits,
    prefill_launch,
    require_pool_dtype,
)
from gpu.kernels.prefill import paged_prefill, prefill_reference  # noqa: E402
from gpu.kernels.resources import CASES, LIMITS, committed_table  # noqa: E402
from gpu.kernels.scoring import Scoring  # noqa: E402
from gpu.kernels.shapes import AttentionShape  # noqa: E402
from gpu.kernels.swap import gather_blocks, scatter_blocks  # noqa: E402
from workloads.errors import UserError  # noqa: E402

H200 = Device("sm_90", 132)
LLAMA = AttentionShape(num_kv_heads=8, group=4, head_dim=128, block_size=16, pool_bytes=2)

# --------------------------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize(
    ("batch", "num_kv_heads", "max_context", "splits"),
    [
        # 8 × 132 = 1,056 programs are wanted.
        (64, 8, 4096, 3),  # 512 programs without splitting: 1,056 / 512, rounded up
        (256, 8, 4096, 1),  # 2,048 are enough
        (1, 8, 4096, 16),  # 132 are wanted of each of 8, but of 64 tiles 4 go to a split
        (1, 1, 2**20, 128),  # never more than 128
        (1, 8, 100, 1),  # less than 4 tiles
        (0, 8, 4096, 16),
    ],
)
def test_splits_of_a_context_in_tiles_of_64_on_132_sms(
    batch: int, num_kv_heads: int, max_context: int, splits: int
) -> None:
    assert num_splits(batch, num_kv_heads, max_context, 64, 132) == splits


@given(
    batch=st.integers(0, 4096),
    num_kv_heads=st.integers(1, 128),
    max_context=st.integers(0, 2**21),
    tile=st.sampled_from([16, 32, 64, 128]),
    num_sms=st.integers(1, 400),
)
def test_splits_fill_the_gpu_if_contexts_are_long_enough_and_are_never_tiny(
    batch: int, num_kv_heads: int, max_context: int, tile: int, num_sms: int
) -> None:
    splits = num_splits(batch, num_kv_heads, max_context, tile, num_sms)
    assert 1 <= splits <= MAX_SPLITS
    if splits > 1:
        assert max_context // splits >= MIN_TILES_PER_SPLIT * tile
        assert batch * num_kv_heads * (splits - 1) < PROGRAMS_PER_SM * num_sms
    elif max_context >= 2 * MIN_TILES_PER_SPLIT * tile and batch:
        assert batch * num_kv_heads >= PROGRAMS_PER_SM * num_sms


# ---------------------------------------------------------------------------------------------------------------- table


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("pool_bytes", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256])
def test_every_device_has_a_launch_for_every_problem(limits: Any, pool_bytes: int, head_dim: int) -> None:
    shape = AttentionShape(8, 4, head_dim, 16, pool_bytes)
    decode, prefill = decode_launch(limits.device, shape), prefill_launch(limits.device, shape)
    for figure in (decode.tile, prefill.tile, prefill.rows):
        assert figure >= 16 and figure & (figure - 1) == 0
    # K and V of the tiles in flight, and the queries, are what shared memory is for.
    tile_bytes = 2 * shape.padded_dim * pool_bytes
    assert (decode.num_stages - 1) * decode.tile * tile_bytes <= limits.shared_bytes
    assert (prefill.num_stages - 1) * prefill.tile * tile_bytes <= limits.shared_bytes


@pytest.mark.parametrize(
    ("target", "like"),
    [("sm_86", "sm_89"), ("sm_87", "sm_80"), ("sm_103", "sm_100"), ("sm_120", "sm_89"), ("gfx90a", "gfx942")],
)
def test_a_gpu_without_a_column_takes_that_of_a_like_one(target: str, like: str) -> None:
    assert decode_launch(Device(target, 100), LLAMA) == decode_launch(Device(like, 100), LLAMA)
    assert prefill_launch(Device(target, 100), LLAMA) == prefill_launch(Device(like, 100), LLAMA)


def test_gpus_before_ampere_are_refused() -> None:
    with pytest.raises(UserError, match="sm_75: the kernels need sm_80 or newer"):
        decode_launch(Device("sm_75", 40), LLAMA)


def test_fp8_pools_need_a_gpu_that_has_fp8() -> None:
    require_pool_dtype(torch.float8_e4m3fn, Device("sm_89", 142))
    require_pool_dtype(torch.bfloat16, Device("sm_80", 108))
    with pytest.raises(UserError, match=r"fp8 \(e4m3\) KV cache on sm_80"):
        require_pool_dtype(torch.float8_e4m3fn, Device("sm_80", 108))


# --------------------------------------------------------------------------------------------------------------- tuning


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test loads is forgotten behind it."""
    monkeypatch.setattr(launches, "_decode_tuned", {})
    monkeypatch.setattr(launches, "_prefill_tuned", {})
    yield


DECODE = {"kernel": "decode", "pool_bytes": 2, "head_dim": 128, "tile": 128, "num_warps": 8, "num_stages": 4}
PREFILL = {**DECODE, "kernel": "prefill", "rows": 64}


def tuning(folder: Path, *entries: object, **changes: object) -> Path:
    path = folder / "tuning.json"
    content = {"device": "sm_90", "versions": {"triton": "3.9.0"}, "entries": entries} | changes
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.usefixtures("untuned")
def test_tuned_launches_take_the_place_of_the_tables_on_their_device_alone(tmp_path: Path) -> None:
    before = decode_launch(Device("sm_100", 148), LLAMA)
    assert load_tuning(tuning(tmp_path, DECODE, PREFILL)) == 2
    assert decode_launch(H200, LLAMA) == DecodeLaunch(tile=128, num_warps=8, num_stages=4)
    assert prefill_launch(H200, LLAMA) == PrefillLaunch(rows=64, tile=128, num_warps=8, num_stages=4)
    assert decode_launch(Device("sm_100", 148), LLAMA) == before
    smaller = AttentionShape(8, 4, 64, 16, 2)
    assert decode_launch(H200, smaller) != DecodeLaunch(tile=128, num_warps=8, num_stages=4)


def without(entry: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in entry.items() if key != name}


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda at: tuning(at, DECODE, {**DECODE, "tile": 100}), "entry 2: tile is 100; expected one of 16, 32, 64"),
        (lambda at: tuning(at, {**DECODE, "num_warps": True}), "entry 1: num_warps is True"),
        (lambda at: tuning(at, {**DECODE, "head_dim": [128]}), r"entry 1: head_dim is \[128\]"),
        (lambda at: tuning(at, {**DECODE, "pool_bytes": "2"}), "entry 1: pool_bytes is '2'"),
        (lambda at: tuning(at, {**DECODE, "splits": 4}), "entry 1: has .*splits.*; expected kernel, pool_bytes"),
        (lambda at: tuning(at, without(PREFILL, "rows")), "entry 1: has .*; expected .*rows"),
        (lambda at: tuning(at, {**DECODE, "kernel": "merge"}), "entry 1: kernel is 'merge'"),
        (lambda at: tuning(at, 5), "entry 1: kernel is None"),
        (lambda at: tuning(at, device="sm_7"), "sm_7: the kernels need"),
        (lambda at: tuning(at, device=None), "device is None"),
        (lambda at: tuning(at, entries={}), "entries is {}; expected a list"),
        (lambda at: tuning(at, author="x"), "expected an object with device, versions and entries"),
        (lambda at: at / "absent.json", "absent.json: not a readable JSON file"),
        (lambda at: at, "not a readable JSON file"),
    ],
)
def test_a_tuning_file_that_says_anything_else_is_refused_whole(
    write: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    before = decode_launch(H200, LLAMA)
    with pytest.raises(UserError, match=message) as error:
        load_tuning(write(tmp_path))
    assert "\n" not in str(error.value)
    assert decode_launch(H200, LLAMA) == before


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.skipif(INTERPRETING, reason="Triton is interpreting, so CPU tensors are welcome")
def test_kernels_refuse_cpu_tensors_and_never_fall_back() -> None:
    q, pool = torch.zeros(1, 4, 64), torch.zeros(2, 2, 16, 64)
    ids = torch.zeros(1, dtype=torch.int32)
    slots, pairs = torch.zeros(1, dtype=torch.int64), torch.zeros((1, 2), dtype=torch.int64)
    bounds = torch.tensor([0, 1], dtype=torch.int32)
    attempts: list[Callable[[], object]] = [
        lambda: paged_decode(q, pool, pool, ids[:, None], ids, scale=1.0),
        lambda: contiguous_decode(q, pool, pool, ids, ids, scale=1.0),
        lambda: paged_prefill(q, pool, pool, ids[:, None], bounds, ids, max_query_len=1, scale=1.0),
        lambda: write_kv(q[:, :2], q[:, :2], pool, pool, slots),
        lambda: copy_blocks(pool, pairs),
    ]
    for attempt in attempts:
        with pytest.raises(UserError, match=r"got a tensor on the CPU.*TRITON_INTERPRET=1"):
            attempt()


@pytest.mark.skipif(INTERPRETING, reason="Triton is interpreting, so the kernel would move them")
def test_swapping_between_cpu_tensors_is_done_by_torch() -> None:
    pool, host = torch.randn(3, 6, 2, 16, 64), torch.zeros(4, 3, 2, 16, 64)
    gather_blocks(pool, torch.tensor([4, 1]), host, torch.tensor([2, 0]))
    assert torch.equal(host[2], pool[:, 4]) and torch.equal(host[0], pool[:, 1]) and not host[1].any()
    scatter_blocks(pool, torch.tensor([5]), host, torch.tensor([2]))
    assert torch.equal(pool[:, 5], pool[:, 4])


# ----------------------------------------------------------------------------------------------------------- references


def test_references_agree_with_torch_on_plain_causal_attention() -> None:
    # Two sequences in one block each, 9 and 6 tokens, all of them queries; decode then asks for the last of each.
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn((2, 2, 2, 16, 64), dtype=torch.float64, generator=generator)
    q = torch.randn((15, 6, 64), dtype=torch.float64, generator=generator)
    tables, lens = torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([9, 6], dtype=torch.int32)
    bounds = torch.tensor([0, 9, 15], dtype=torch.int32)
    expected = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                q[begin:end].transpose(0, 1)[None],
                pool[0, block, :, : end - begin][None],
                pool[1, block, :, : end - begin][None],
                is_causal=True,
                enable_gqa=True,
                scale=0.1,
            )[0].transpose(0, 1)
            for begin, end, block in ((0, 9, 1), (9, 15, 0))
        ]
    )
    out, lse = prefill_reference(q, pool[0], pool[1], tables, bounds, lens, Scoring(0.1), torch.float64)
    torch.testing.assert_close(out, expected)
    last, last_lse = decode_reference(q[[8, 14]], pool[0], pool[1], tables, lens, Scoring(0.1), torch.float64)
    torch.testing.assert_close(last, expected[[8, 14]])
    torch.testing.assert_close(last_lse, lse[[8, 14]])


def test_reference_with_options_is_the_formula_of_two_keys() -> None:
    # One head of size 1, keys 1, 2, 3 and values 10, 20, 30, query 1 at position 2, a window of 2: scores 2 and 3,
    # which a cap of 4 makes 4 tanh(2/4) and 4 tanh(3/4); the sink 0.5 joins the sum with no value.
    pool = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], dtype=torch.float64).view(2, 1, 1, 3, 1)
    scoring = Scoring(1.0, window=2, softcap=4.0, sinks=torch.tensor([0.5]))
    out, lse = decode_reference(
        torch.ones((1, 1, 1), dtype=torch.float64),
        pool[0],
        pool[1],
        torch.tensor([[0]], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        scoring,
        torch.float64,
    )
    weights = torch.exp(4 * torch.tanh(torch.tensor([0.5, 0.75], dtype=torch.float64)))
    total = weights.sum() + torch.exp(torch.tensor(0.5, dtype=torch.float64))
    torch.testing.assert_close(out.view(()), (weights * torch.tensor([20.0, 30.0])).sum() / total)
    torch.testing.assert_close(lse.view(()), torch.log(total))


# ------------------------------------------------------------------------------------------------------------- document


def test_the_document_has_a_row_for_every_case_and_none_that_spills() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in committed_table().splitlines()]
    assert rows[0] == ["problem", "kernel", *(limits.device.target for limits in LIMITS)]
    assert {row[0] for row in rows[2:]} == {case.name for case in CASES}
    for row in rows[2:]:
        for limits, cell in zip(LIMITS, row[2:], strict=True):
            if cell != "not launched":
                _, stack_bytes, rest = cell.split(" / ")
                assert stack_bytes == "0", row
                assert int(rest.split()[0].replace(",", "")) <= limits.shared_bytes, row
