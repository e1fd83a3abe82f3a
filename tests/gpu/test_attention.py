"""Attention by PyTorch over the pool, against the definition; and what the hook refuses."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine needs PyTorch")
pytest.importorskip("transformers", reason="the hook is transformers'")

from attention_cases import DECODES, MIXED, rules, step_and_reference  # noqa: E402

from gpu.attention import (  # noqa: E402
    ScoreRule,
    SdpaAttention,
    Step,
    TritonAttention,
    default_backend,
    paged_attention,
    running,
)
from gpu.batch import Batch, BatchBuilder, BlockTables, DecodeShape, SequenceWork  # noqa: E402
from gpu.pool import KVPool  # noqa: E402
from sim.kv_layout import ModelSpec  # noqa: E402
from workloads.errors import UserError  # noqa: E402

SPEC = ModelSpec("tiny", 1, 64, 4, 2, 16, 96, 128, 256, dtype="float32")


def one_token() -> Batch:
    """One sequence of one token, in slot 0."""
    tables = BlockTables(1, 1)
    work = SequenceWork(tables.take(), np.zeros(1, np.int64), 1, [0])
    return BatchBuilder(tables, 4, 4, "cpu").build([work])


@pytest.mark.parametrize("block_size", [1, 16, 5])
@pytest.mark.parametrize("name", rules())
def test_mixed_step_is_what_the_definition_says(name: str, block_size: int) -> None:
    out, expected = step_and_reference(SdpaAttention(), rules()[name], MIXED, block_size)
    # Sums of up to 33 products of numbers around 1, in float32: some 33 x 2^-24 = 2e-6.
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", rules())
def test_attention_reads_an_eight_bit_pool_times_its_scale(name: str) -> None:
    out, expected = step_and_reference(SdpaAttention(), rules()[name], MIXED, 5, "fp8")
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_padded_rows_do_not_disturb_the_others() -> None:
    out, expected = step_and_reference(SdpaAttention(), ScoreRule(0.3), DECODES, 4, pad_to=DecodeShape(5, 8))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_eight_bit_pool_holds_the_nearest_number_of_the_format() -> None:
    pool = KVPool(SPEC, 1, 4, "fp8", scales=[(0.5, 1.0)])
    layer = pool.layer(0)
    # Divided by the scale of 0.5: 1.98, -1e6, 2^-9, 2.1, 0. Numbers of e4m3 have 3 bits after the point of their
    # mantissa, so from 2 to 4 they are 0.25 apart; the largest is 448, the smallest
    # 2^-9, and half of that is rounded to even, 0.
    key = torch.zeros(1, 2, 16)
    key[0, 0, :5] = torch.tensor([0.99, -5e5, 2.0**-10, 1.05, 0.0])
    SdpaAttention().attend(torch.ones(1, 4, 16), key, key, layer, one_token(), ScoreRule(1e-6))
    assert layer.keys[0, 0, 0, :5].float().tolist() == [2.0, -448.0, 2.0**-9, 2.0, 0.0]
    assert layer.values[0, 0, 0, :5].float().tolist() == [1.0, -448.0, 0.0, 1.0, 0.0]


def test_cpu_gets_torch_and_a_gpu_gets_triton() -> None:
    assert isinstance(default_backend(torch.device("cpu")), SdpaAttention)
    assert isinstance(default_backend(torch.device("cuda")), TritonAttention)


class Layer(torch.nn.Module):
    """What the hook sees of a model's layer."""

    def __init__(self, layer_idx: int | None = 0, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal
        if layer_idx is not None:
            self.layer_idx = layer_idx


def call(module: torch.nn.Module, num_kv_heads: int = 2, value_dim: int = 16, mask: torch.Tensor | None = None) -> None:
    with running(Step(one_token(), KVPool(SPEC, 2, 4), SdpaAttention())):
        paged_attention(
            module,
            torch.ones(1, 4, 1, 16),
            torch.ones(1, num_kv_heads, 1, 16),
            torch.ones(1, num_kv_heads, 1, value_dim),
            mask,
        )


def test_hook_accepts_what_the_pool_is_laid_out_for() -> None:
    call(Layer())


@pytest.mark.parametrize(
    ("module", "options", "reason"),
    [
        (Layer(), {"num_kv_heads": 4}, "layer 0 has keys of 4 heads of 16, but the pool is laid out for 2 of 16"),
        (Layer(), {"value_dim": 8}, "layer 0 has values of 2 heads of 8"),
        (Layer(), {"mask": torch.zeros(1, 1, 1, 1)}, "a mask of its own"),
        (Layer(is_causal=False), {}, "does not attend causally"),
        (Layer(layer_idx=None), {}, "does not say which layer it is"),
    ],
)
def test_hook_refuses_what_it_cannot_stand_in_for(
    module: torch.nn.Module, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        call(module, **options)
    assert "\n" not in str(refused.value)


def test_hook_outside_a_step_is_an_error() -> None:
    query = torch.ones(1, 2, 1, 16)
    with pytest.raises(RuntimeError, match="outside a step"):
        paged_attention(Layer(), query, query, query, None)
