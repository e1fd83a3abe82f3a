"""The engine on our kernels, under Triton's interpreter. Run by `test_interpreted.py`, in a process of its own."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DECODES, MIXED, rules, step_and_reference
from greedy import by_generate, by_pages, prompts
from test_pool import SPEC, contents
from tiny_models import plain_model

from gpu.attention import TritonAttention
from gpu.batch import DecodeShape
from gpu.block_transfer import TritonTransfer
from gpu.models import PagedModel
from gpu.pool import KVPool


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_tokens_are_those_of_generate(kind: str) -> None:
    plain = plain_model(kind)
    requests = prompts(128, [13, 3])
    expected = [by_generate(plain, prompt, 3)[0] for prompt in requests]
    assert by_pages(PagedModel(plain, kind, TritonAttention()), requests, 3, 16, max_chunk=12) == expected


@pytest.mark.parametrize(("name", "block_size"), [("plain", 5), ("sinks", 16), ("all", 5), ("all", 16)])
def test_mixed_step_is_what_the_definition_says(name: str, block_size: int) -> None:
    out, expected = step_and_reference(TritonAttention(), rules()[name], MIXED, block_size)
    # As for PyTorch's attention, and tanh by exponentials costs a digit.
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)


def test_attention_reads_an_eight_bit_pool_times_its_scale() -> None:
    out, expected = step_and_reference(TritonAttention(), rules()["plain"], MIXED, 16, "fp8")
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)


def test_padded_rows_do_not_disturb_the_others() -> None:
    out, expected = step_and_reference(TritonAttention(), rules()["plain"], DECODES, 4, pad_to=DecodeShape(5, 8))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)


def test_blocks_are_copied_and_swapped_bit_for_bit() -> None:
    pools = [KVPool(SPEC, 9, 3, num_host_blocks=5, transfer=transfer) for transfer in (TritonTransfer(), None)]
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, pools[0].blocks.view(torch.uint8).shape, generator=generator, dtype=torch.uint8)
    for pool in pools:
        pool.blocks.view(torch.uint8).copy_(data)
        pool.copy([(0, 4), (0, 7), (8, 2)])
        pool.swap_out([(4, 0), (1, 4)])
        pool.swap_in([(4, 3), (0, 0)])
    by_kernels, by_torch = map(contents, pools)
    assert torch.equal(by_kernels, by_torch)
    assert not torch.equal(by_kernels, data)
