"""The roofline against hand sums, and the constant timer."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from sim.config import build
from sim.hardware import Deployment, Hardware
from sim.kv_layout import ModelSpec
from sim.plan import StepWork
from sim.timing.constant import Constant
from sim.timing.roofline import Roofline
from workloads.errors import UserError

CONF = Path(__file__).parents[2] / "conf"
SHARES = (
    "compute_efficiency",
    "bandwidth_efficiency",
    "attention_compute_efficiency",
    "attention_bandwidth_efficiency",
    "interconnect_efficiency",
)


def load(group: str, name: str) -> Any:
    node = OmegaConf.load(CONF / group / f"{name}.yaml")
    assert isinstance(node, DictConfig)
    return build(node, group)


def ideal(model: str, gpu: str, deployment: Deployment | None = None, **knobs: float) -> Roofline:
    """A roofline that reaches every peak and adds nothing, so that sums can be done by hand."""
    spec: ModelSpec = load("model", model)
    hardware: Hardware = load("hardware", gpu)
    values = {**dict.fromkeys(SHARES, 1.0), "allreduce_latency": 0.0, "step_overhead": 0.0, **knobs}
    return Roofline(spec, hardware, deployment or Deployment(), **values)


def default(model: str, gpu: str, deployment: Deployment | None = None) -> Roofline:
    node = OmegaConf.load(CONF / "timing" / "roofline.yaml")
    assert isinstance(node, DictConfig)
    supplied = {"model": load("model", model), "hardware": load("hardware", gpu)}
    timer = build(node, "timing", deployment=deployment or Deployment(), **supplied)
    assert isinstance(timer, Roofline)
    return timer


def decode(sequences: int, context: int, block_size: int = 0) -> StepWork:
    """A decode step of `sequences`, each with `context` tokens in blocks of `block_size`; 0 is contiguous memory."""
    blocks = sequences * -(-context // block_size) if block_size else 0
    return StepWork(sequences, sequences, 0, 0, 0, sequences, sequences * context, blocks)


def prefill(tokens: int, cached: int = 0) -> StepWork:
    """A step of one chunk of `tokens` after `cached` computed ones."""
    return StepWork(1, tokens, tokens, tokens * cached + tokens * (tokens + 1) // 2, cached + tokens)


def test_one_decode_reads_every_weight_once() -> None:
    # Llama-3.1-8B without its embedding (128,256 * 4,096), without norms: 8,029,995,008 - 525,336,576 = 7,504,658,432
    # weights of 2 B, at 2,039 GB/s: 7.361 ms. Context 1: one token's KV of 131,072 B more.
    seconds = ideal("llama-3.1-8b", "a100-80gb").seconds(decode(1, 1))
    assert seconds == pytest.approx((7_504_658_432 * 2 + 131_072) / 2039e9, rel=1e-9)


def test_default_decode_is_no_faster_than_the_weights() -> None:
    assert default("llama-3.1-8b", "a100-80gb").seconds(decode(1, 1)) > 7_504_658_432 * 2 / 2039e9


def test_long_prefill_takes_two_flops_a_parameter_and_token() -> None:
    # 8,192 tokens are compute-bound: 2 * 6,979,321,856 layer weights (without embedding and output projection) each,
    # and 4 * 32 heads * 128 * 32 layers = 524,288 FLOPs for each of 8,192 * 8,193 / 2 pairs. The output projection is
    # one row, so its matrix of 128,256 * 4,096 * 2 B is what counts.
    layers = 8_029_995_008 - 2 * 525_336_576
    flops = 2 * layers * 8192 + 524_288 * 8192 * 8193 // 2
    expected = flops / 312e12 + 525_336_576 * 2 / 2039e9
    assert ideal("llama-3.1-8b", "a100-80gb").seconds(prefill(8192)) == pytest.approx(expected, rel=1e-9)


def test_decode_attention_reads_the_cache() -> None:
    # 100 sequences of 1,000 tokens: 100,000 * 131,072 B at 2,039 GB/s are 6.43 ms over one with no context to speak of.
    timer = ideal("llama-3.1-8b", "a100-80gb")
    assert timer.seconds(decode(100, 1000)) - timer.seconds(decode(100, 1)) == pytest.approx(
        100 * 999 * 131_072 / 2039e9, rel=1e-9
    )


def test_block_table_at_block_size_one_costs_under_one_per_cent() -> None:
    # 8 heads * 32 layers * 4 B = 1,024 B of table beside 131,072 B of KV a token: 1/128 = 0.78 % of the attention.
    # FlashInfer measured page size 1 within 1 % of dense (arXiv 2501.01005, appendix B).
    timer = ideal("llama-3.1-8b", "a100-80gb")
    contiguous, base = timer.seconds(decode(64, 2000)), timer.seconds(decode(64, 0))
    paged = timer.seconds(decode(64, 2000, block_size=1))
    assert (paged - contiguous) / (contiguous - base) == pytest.approx(1 / 128, rel=1e-6)
    # At 16 tokens a block it is a sixteenth of that.
    paged = timer.seconds(decode(64, 2000, block_size=16))
    assert (paged - contiguous) / (contiguous - base) == pytest.approx(1 / 2048, rel=1e-6)


def test_copied_blocks_are_read_once_and_written_once() -> None:
    # Two blocks of 16 of Llama-2-7B: 32 tokens of 32 layers * 2 * 4096 * 2 bytes, twice, at 2,039 GB/s. Half on each of
    # two GPUs.
    work = decode(4, 100, 16)
    for deployment, share in ((Deployment(), 1.0), (Deployment(tensor_parallel=2), 0.5)):
        timer = ideal("llama-2-7b", "a100-80gb", deployment)
        copies = timer.seconds(replace(work, copied_slots=32)) - timer.seconds(work)
        assert copies == pytest.approx(share * 2 * 32 * 524_288 / 2039e9, rel=1e-6)


def test_tensor_parallelism_halves_the_weight_traffic() -> None:
    # No latency, and a link so fast that nothing else is left (activations of one token are 8 KiB).
    one, two = (ideal("llama-3.1-8b", "a100-80gb", Deployment(tensor_parallel=n)) for n in (1, 2))
    ring = 64 * 2 * (1 / 2) * 4096 * 2 / 300e9
    assert two.seconds(decode(1, 1)) - ring == pytest.approx(one.seconds(decode(1, 1)) / 2, rel=1e-9)


def test_all_reduces_are_two_a_layer_on_a_ring() -> None:
    # 2 * 80 all-reduces of 1,000 tokens * 8,192 * 2 B; a ring moves 2 * 7/8 of that over 450 GB/s, and 10 µs each.
    slow = ideal("llama-3.1-70b", "h100-80gb", Deployment(tensor_parallel=8), allreduce_latency=1e-5)
    half = ideal("llama-3.1-70b", "h100-80gb", Deployment(tensor_parallel=8), interconnect_efficiency=0.5)
    exact = ideal("llama-3.1-70b", "h100-80gb", Deployment(tensor_parallel=8))
    work = prefill(1000)
    assert slow.seconds(work) - exact.seconds(work) == pytest.approx(160 * 1e-5, rel=1e-6)
    ring = 160 * 2 * 7 / 8 * 1000 * 8192 * 2 / 450e9
    assert half.seconds(work) - exact.seconds(work) == pytest.approx(ring, rel=1e-6)


def test_pipeline_takes_turns() -> None:
    # One batch in flight: the same sum over layers, and 3 transfers of 1,000 tokens * 4,096 * 2 B at 300 GB/s.
    one = ideal("llama-3.1-8b", "a100-80gb").seconds(prefill(1000))
    four = ideal("llama-3.1-8b", "a100-80gb", Deployment(pipeline_parallel=4)).seconds(prefill(1000))
    assert four - one == pytest.approx(3 * 1000 * 4096 * 2 / 300e9, rel=1e-6)


def test_experts_read_are_those_touched() -> None:
    # Mixtral, one token: 2 of 8 experts in each of 32 layers, 3 * 4,096 * 14,336 weights each. 1,000,000 tokens would
    # touch all 8. From 1 token to 3 the expectation goes from 2 to 8 * (1 - 0.75**3) = 4.625 experts.
    timer = ideal("mixtral-8x7b", "h100-80gb")
    expert = 32 * 3 * 4096 * 14_336 * 2 / 3350e9
    kv = 131_072 / 3350e9
    assert timer.seconds(decode(3, 1)) - timer.seconds(decode(1, 1)) == pytest.approx(2.625 * expert + 2 * kv, rel=1e-6)


def test_all_experts_may_be_visited_by_every_token() -> None:
    spec: ModelSpec = load("model", "mixtral-8x7b")
    gpu: Hardware = load("hardware", "h100-80gb")
    assert spec.experts is not None
    spec = replace(spec, experts=replace(spec.experts, experts_per_token=8))
    timer = Roofline(spec, gpu, Deployment(), **dict.fromkeys(SHARES, 1.0), allreduce_latency=0.0, step_overhead=0.0)
    weights = spec.matrix_parameters() - spec.embedding_parameters()
    assert timer.seconds(decode(1, 1)) == pytest.approx((weights * 2 + 131_072) / 3350e9, rel=1e-9)


def test_active_parameters_of_deepseek_v3() -> None:
    # "37B activated for each token" (arXiv 2412.19437): 2 FLOPs for each in a batch large enough to be compute-bound.
    # Attention pairs are left out of the work, and looking up the embedding (0.93e9) takes no FLOPs: within 3 %.
    seconds = ideal("deepseek-v3", "h200-141gb").seconds(StepWork(num_sequences=10**6, num_tokens=10**6))
    assert seconds * 989.5e12 / 2 / 10**6 / 1e9 == pytest.approx(37, rel=0.03)


def test_sliding_layers_read_their_window_only() -> None:
    # gpt-oss-20b: 12 full and 12 sliding layers of 128 tokens, 2,048 B a token and layer; 10 sequences of 10,000.
    timer = ideal("gpt-oss-20b", "h100-80gb")
    read = 12 * 2048 * 10 * (10_000 + 128)
    base = timer.seconds(replace(decode(10, 10_000), decode_sequences=0))
    assert timer.seconds(decode(10, 10_000)) - base == pytest.approx(read / 3350e9, rel=1e-6)


def test_sliding_chunk_is_bounded_by_its_window() -> None:
    # A chunk of 2,048 tokens after 100,000: 12 full layers see all pairs, 12 sliding ones 2,048 * 128; 4 * 64 * 64
    # FLOPs a pair.
    timer, work = ideal("gpt-oss-20b", "h100-80gb"), prefill(2048, cached=100_000)
    flops = 4 * 64 * 64 * 12 * (work.prefill_pairs + 2048 * 128)
    base = timer.seconds(replace(work, prefill_tokens=0))
    assert timer.seconds(work) - base == pytest.approx(flops / 989.5e12, rel=1e-6)


def test_latent_attention_can_be_compute_bound() -> None:
    # DeepSeek-V3 on 8 GPUs: 16 heads * 2 * (2 * 512 + 64) = 34,816 FLOPs against 1,152 B a token and layer: 30 FLOPs a
    # byte, so memory-bound; on one GPU all 128 heads, 242 FLOPs a byte, above the H200's 206: compute-bound.
    eight, one = (ideal("deepseek-v3", "h200-141gb", Deployment(tensor_parallel=n)) for n in (8, 1))
    for timer, seconds in ((eight, 1152 / 4800e9), (one, 8 * 34_816 / 989.5e12)):
        grown = timer.seconds(decode(64, 2000)) - timer.seconds(decode(64, 1000))
        assert grown == pytest.approx(64_000 * 61 * seconds, rel=1e-6)


def test_overheads_are_added_once_a_step_and_once_a_sequence() -> None:
    exact = ideal("llama-3.1-8b", "l4").seconds(decode(5, 100))
    for overhead, added in (("step_overhead", 0.01), ("sequence_overhead", 5 * 0.01)):
        slow = ideal("llama-3.1-8b", "l4", **{overhead: 0.01}).seconds(decode(5, 100))
        assert slow - exact == pytest.approx(added)


@st.composite
def works(draw: st.DrawFn) -> StepWork:
    decodes, chunks = draw(st.integers(0, 300)), draw(st.integers(0, 8))
    tokens = draw(st.integers(2 * chunks, 2048 * chunks))
    pairs = draw(st.integers(tokens, 10**9)) if chunks else 0
    context = draw(st.integers(tokens, 10**6)) if chunks else 0
    kv = draw(st.integers(decodes, 10**6)) if decodes else 0
    blocks = draw(st.integers(0, kv))
    return StepWork(decodes + chunks, decodes + tokens, tokens, pairs, context, decodes, kv, blocks)


MONOTONE = {
    "dense": default("llama-3.1-8b", "a100-80gb"),
    "experts": default("mixtral-8x7b", "h100-80gb", Deployment(tensor_parallel=2)),
    "sliding": default("gpt-oss-20b", "l40s"),
    "latent": default("deepseek-v3", "h200-141gb", Deployment(tensor_parallel=8)),
}


@pytest.mark.parametrize("kind", MONOTONE)
@pytest.mark.parametrize("name", [field.name for field in fields(StepWork)])
@given(work=works(), more=st.integers(1, 5000))
def test_more_work_never_takes_less_time(kind: str, name: str, work: StepWork, more: int) -> None:
    grown = replace(work, **{name: getattr(work, name) + more})
    if name == "decode_sequences":  # a sequence more is one in the batch, too
        grown = replace(grown, num_sequences=grown.num_sequences + more)
    before, after = MONOTONE[kind].seconds(work), MONOTONE[kind].seconds(grown)
    assert 0 < before <= after * (1 + 1e-12)
    assert math.isfinite(after)


def test_opt_13b_is_faster_than_the_engine_of_the_paper() -> None:
    # Kwon et al., Fig. 13, by Little's law: about 45 ms for each output token with 30.42 requests on an A100-40GB, in
    # an eager engine and with prefills in between. Weights alone take 25.7 GB / (0.85 * 1,555 GB/s) = 19.4 ms, the
    # KV of 30 * 500 tokens 12.3 GB / (0.7 * 1,555 GB/s) = 11.3 ms.
    seconds = default("opt-13b", "a100-40gb").seconds(decode(30, 500, block_size=16))
    assert 0.0307 < seconds < 0.045


@pytest.mark.parametrize("share", SHARES)
def test_share_outside_zero_to_one_is_named(share: str) -> None:
    with pytest.raises(UserError, match=rf"timing.{share} is 1.1; expected a share above 0 and at most 1"):
        ideal("llama-3.1-8b", "l4", None, **{share: 1.1})


def test_negative_time_is_named() -> None:
    with pytest.raises(UserError, match=r"timing\.step_overhead is -1"):
        ideal("llama-3.1-8b", "l4", step_overhead=-1.0)


def test_degree_that_does_not_split_the_model_is_refused() -> None:
    with pytest.raises(UserError, match="tensor_parallel is 3"):
        ideal("llama-3.1-8b", "l4", Deployment(tensor_parallel=3))


def test_constant_timer_counts_tokens() -> None:
    # 5 tokens: 0.02 + 5 * 0.001.
    assert Constant(0.02, 0.001).seconds(decode(5, 100)) == pytest.approx(0.025)
    timer = load("timing", "constant")
    assert timer.seconds(prefill(100)) == 0.025


@pytest.mark.parametrize(("step", "token"), [(-1.0, 0.0), (1.0, -1.0), (0.0, 0.0)])
def test_constant_timer_needs_time_to_pass(step: float, token: float) -> None:
    with pytest.raises(UserError, match=r"timing\.(step_seconds|seconds_per_token)"):
        Constant(step, token)
