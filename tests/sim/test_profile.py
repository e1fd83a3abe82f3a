"""The profile timer on tables small enough to add up by hand, and what it says of tables it cannot use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sim.hardware import Deployment
from sim.kv_layout import Experts, ModelSpec
from sim.memory.paged import PagedMemory
from sim.plan import StepPlan
from sim.scheduler.continuous import ContinuousBatching
from sim.scheduler.queues import Fcfs
from sim.timing.profile import Profile
from workloads.errors import UserError
from workloads.request import Request

US = 1e-6
MODEL = ModelSpec(
    name="two-layers",
    num_layers=2,
    hidden_size=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=8,
    vocab_size=10,
    max_model_len=4096,
    dtype="bfloat16",
    num_parameters=1000,
)
# Per token: embedding 1, norms 2 each, projection 10, final norm 3; each with a constant that tells it from the others.
DENSE = {
    "embedding": (5, 1),
    "layernorm": (0, 2),
    "qkv_proj": (100, 10),
    "final_layernorm": (0, 3),
}


def write_tables(folder: Path, mixed: bool = True) -> Path:
    """Linear in everything, so that interpolation is exact; a mixed batch costs 7 µs more than its parts."""
    (folder / "dense.csv").write_text(
        "layer,tokens,time_us\n"
        + "".join(f"{name},{t},{base + slope * t}\n" for name, (base, slope) in DENSE.items() for t in (1, 100))
    )
    (folder / "per_sequence.csv").write_text(
        "layer,sequences,time_us\nlm_head,1,50\nlm_head,11,60\nsampler,1,1\nsampler,11,11\n"
    )
    rows = [(q, c, 0, 0, prefill(q, c)) for q in (10, 90) for c in (0, 500)]
    rows += [(0, 0, n, k, decode(n, k)) for n in (1, 11) for k in (10, 1010)]
    if mixed:
        rows += [
            (q, c, n, k, prefill(q, c) + decode(n, k) + 7)
            for q in (10, 90)
            for c in (0, 500)
            for n in (1, 11)
            for k in (10, 1010)
        ]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    (folder / "attention.csv").write_text("prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n" + text)
    return folder


def prefill(tokens: float, computed: float) -> float:
    return 20 + tokens + 0.1 * computed


def decode(sequences: float, context: float) -> float:
    return 5 + 0.01 * sequences * context


def timer(folder: Path, model: ModelSpec = MODEL, deployment: Deployment | None = None, **knobs: float) -> Profile:
    values = {
        "step_overhead": 0.0,
        "allreduce_latency": 0.0,
        "allreduce_bandwidth": 1e9,
        "skew_share": 0.0,
        **knobs,
    }
    return Profile(model, deployment or Deployment(), str(folder), **values)


def engine(*requests: Request, leap: bool = False) -> ContinuousBatching:
    memory = PagedMemory(200, 16, prefix_caching=False)
    scheduler = ContinuousBatching(memory, 4096, Fcfs(), max_num_batched_tokens=90, leap=leap)
    for request in requests:
        scheduler.arrive(request)
    return scheduler


def run(scheduler: ContinuousBatching, steps: int) -> StepPlan:
    """Takes `steps` steps and plans one more."""
    for _ in range(steps):
        scheduler.commit(scheduler.schedule())
    return scheduler.schedule()


def dense(tokens: int) -> float:
    # embedding and final norm once, two norms and a projection in each of 2 layers.
    return 5 + tokens + 3 * tokens + 2 * (2 * 2 * tokens + 100 + 10 * tokens)


def heads(sequences: int) -> float:
    return 50 + (sequences - 1) + 1 + (sequences - 1)


def test_a_prefill_step_is_the_sum_of_its_tables(tmp_path):
    plan = run(engine(Request(0, 0.0, 40, 5)), 0)
    expected = dense(40) + heads(1) + 2 * prefill(40, 0)
    assert timer(write_tables(tmp_path)).durations(plan) == pytest.approx([expected * US])


def test_decodes_are_priced_at_their_mean_context(tmp_path):
    # Prompts of 20 and 40 tokens in one step; in the next both compute one token more: 21 and 41, 31 on average.
    plan = run(engine(Request(0, 0.0, 20, 5), Request(1, 0.0, 40, 5)), 1)
    expected = dense(2) + heads(2) + 2 * decode(2, 31)
    assert timer(write_tables(tmp_path)).durations(plan) == pytest.approx([expected * US])


@pytest.mark.parametrize("mixed", [True, False])
def test_a_mixed_step_costs_what_the_table_says_or_the_sum_of_its_parts_if_it_says_nothing(tmp_path, mixed):
    # The budget of 90: 20 and 70 of a prompt of 100, then one decode at 21 beside the other's 30 after 70.
    plan = run(engine(Request(0, 0.0, 20, 5), Request(1, 0.0, 100, 5)), 1)
    expected = dense(31) + heads(2) + 2 * (prefill(30, 70) + decode(1, 21) + 7 * mixed)
    assert timer(write_tables(tmp_path, mixed)).durations(plan) == pytest.approx([expected * US])


def test_a_further_chunk_adds_what_it_costs_less_the_least_that_a_call_costs(tmp_path):
    # Chunks of 20 and 70: the larger in full, the other without the 30 µs that even the smallest measured chunk costs.
    plan = run(engine(Request(0, 0.0, 20, 5), Request(1, 0.0, 70, 5)), 0)
    expected = dense(90) + heads(2) + 2 * (prefill(70, 0) + prefill(20, 0) - prefill(10, 0))
    assert timer(write_tables(tmp_path)).durations(plan) == pytest.approx([expected * US])


def test_a_leap_costs_what_its_steps_do_one_by_one(tmp_path):
    requests = Request(0, 0.0, 20, 30), Request(1, 0.0, 33, 30)
    (tmp_path / "tables").mkdir()
    profile = timer(write_tables(tmp_path / "tables"))
    leaping, stepping = engine(*requests, leap=True), engine(*requests)
    for scheduler in (leaping, stepping):
        scheduler.commit(scheduler.schedule())
    leap = leaping.schedule(20)
    assert leap.repeat == 20
    single = []
    for _ in range(20):
        plan = stepping.schedule()
        single += profile.durations(plan)
        stepping.commit(plan)
    assert profile.durations(leap) == single


def test_the_host_and_the_all_reduces_are_added(tmp_path):
    # 2 GPUs: 2 layers * 2 all-reduces, each 3 µs and 40 tokens * 4 elements * 2 bytes over 1 GB/s: 0.32 µs.
    plan = run(engine(Request(0, 0.0, 40, 5)), 0)
    profile = timer(
        write_tables(tmp_path),
        deployment=Deployment(tensor_parallel=2),
        allreduce_latency=3 * US,
        step_overhead=11 * US,
    )
    expected = dense(40) + heads(1) + 2 * prefill(40, 0) + 4 * (3 + 0.32) + 11
    assert profile.durations(plan) == pytest.approx([expected * US])


def test_uneven_contexts_cost_the_share_of_the_way_to_the_longest_that_the_table_says(tmp_path):
    # Contexts 21 and 61: mean 41, longest 61. alpha is 0.5 throughout: halfway to a batch of two with 61.
    write_tables(tmp_path)
    rows = [f"pure,{n},{b},0,0,{k},{4 * k},0.5" for n in (2, 8) for b in (1, n // 2) for k in (8, 80)]
    (tmp_path / "skew.csv").write_text("regime,n,nb,pc,kp,kvs,kv_big,alpha\n" + "\n".join(rows) + "\n")
    plan = run(engine(Request(0, 0.0, 20, 5), Request(1, 0.0, 60, 5)), 1)
    even, longest = decode(2, 41), decode(2, 61)
    for share in (0.0, 0.4, 1.0):
        expected = dense(2) + heads(2) + 2 * (even + share * 0.5 * (longest - even))
        assert timer(tmp_path, skew_share=share).durations(plan) == pytest.approx([expected * US])


def test_experts_are_read_as_often_as_independent_even_routing_touches_them(tmp_path):
    # 2 of 4 experts for each of 2 tokens: 4 * (1 - 0.5 ** 2) = 3 touched, 30 µs in each of 2 layers.
    write_tables(tmp_path)
    rows = [f"1,{tokens},{experts},{10 * experts}" for tokens in (1, 100) for experts in (2, 4)]
    (tmp_path / "moe.csv").write_text("ep,tokens,activated_experts,time_us\n" + "\n".join([*rows, "2,1,2,999"]) + "\n")
    model = replace(MODEL, experts=Experts(num_experts=4, experts_per_token=2, intermediate_size=8))
    plan = run(engine(Request(0, 0.0, 2, 5)), 0)
    expected = dense(2) + heads(1) + 2 * prefill(2, 0) + 2 * 30
    assert timer(tmp_path, model).durations(plan) == pytest.approx([expected * US])
    with pytest.raises(UserError, match=r"two-layers is none\. Choose its model"):
        timer(tmp_path)
    (tmp_path / "moe.csv").unlink()
    with pytest.raises(UserError, match=r"has no moe.csv, nor a dense layer with moe in its name"):
        timer(tmp_path, model)
    with (tmp_path / "dense.csv").open("a") as stream:
        stream.write("moe,1,40\nmoe,100,40\n")
    expected = dense(2) + heads(1) + 2 * prefill(2, 0) + 2 * 40
    assert timer(tmp_path, model).durations(plan) == pytest.approx([expected * US])


def test_what_lies_beyond_the_tables_is_continued_and_said(tmp_path):
    profile = timer(write_tables(tmp_path))
    plan = run(engine(*(Request(i, 0.0, 5, 5) for i in range(15))), 1)
    # 15 decodes of 6 tokens; the tables end at 11 sequences and begin at 10 tokens, and are linear.
    expected = dense(15) + heads(15) + 2 * decode(15, 6)
    assert profile.durations(plan) == pytest.approx([expected * US])
    assert profile.notices == [
        "sequences of a step: 15 were asked for, 11 are measured; continued linearly",
        "sequences that decode: 15 were asked for, 11 are measured; continued linearly",
    ]


def test_tables_that_cannot_be_used_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"dense.csv: no such file; timing.path takes a folder"):
        timer(tmp_path)
    write_tables(tmp_path)
    for options, message in (
        ({"skew_share": 1.5}, r"timing.skew_share is 1.5"),
        ({"step_overhead": -1.0}, r"timing.step_overhead is -1.0"),
        ({"allreduce_bandwidth": 0.0}, r"timing.allreduce_bandwidth is 0.0"),
    ):
        with pytest.raises(UserError, match=message):
            timer(tmp_path, **options)
    with pytest.raises(UserError, match="pipeline_parallel=1"):
        timer(tmp_path, deployment=Deployment(pipeline_parallel=2))
    (tmp_path / "dense.csv").write_text("layer,tokens,time_us\nqkv_proj,1,fast\n")
    with pytest.raises(UserError, match=r"dense.csv, line 2: time_us is 'fast'"):
        timer(tmp_path)
    (tmp_path / "dense.csv").write_text("layer,time_us\n")
    with pytest.raises(UserError, match=r"dense.csv has no column tokens"):
        timer(tmp_path)


def test_vidurs_profiles_are_read_at_the_degree_that_is_asked_for(tmp_path):
    # Milliseconds. Two norms of their own names, each once a layer; a cache write is part of attention.
    operations = ("emb", "input_layernorm", "attn_pre_proj", "post_attention_layernorm")
    header = ",".join(f"time_stats.{name}.median" for name in operations)
    (tmp_path / "mlp.csv").write_text(
        f"{header},num_tokens,num_tensor_parallel_workers\n1,2,3,4,1,1\n11,12,13,14,101,1\n9,9,9,9,1,2\n"
    )
    times = "time_stats.attn_prefill.median,time_stats.attn_decode.median,time_stats.attn_kv_cache_save.median"
    (tmp_path / "attention.csv").write_text(
        f"batch_size,prefill_chunk_size,kv_cache_size,num_tensor_parallel_workers,{times}\n"
        + "".join(f"1,{q},{c},1,{q + c / 10},,0.5\n" for q in (1, 101) for c in (0, 100))
        + "".join(f"{n},0,{k},1,,{n * k},0.5\n" for n in (1, 11) for k in (1, 101))
    )
    prompt = run(engine(Request(0, 0.0, 41, 5)), 0)
    # At 41 tokens, 40 % of the way: emb 5, norms 6 and 8, projection 7; attention 41 and the write.
    assert timer(tmp_path).durations(prompt) == pytest.approx([(5 + 2 * (6 + 7 + 8) + 2 * 41.5) * 1e-3])
    decodes = run(engine(Request(0, 0.0, 20, 5)), 1)
    assert timer(tmp_path).durations(decodes) == pytest.approx([(1 + 2 * (2 + 3 + 4) + 2 * 21.5) * 1e-3])
    with pytest.raises(UserError, match=r"no usable row of num_tensor_parallel_workers = 4"):
        timer(tmp_path, deployment=Deployment(tensor_parallel=4))
