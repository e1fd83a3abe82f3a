"""Greedy decoding two ways: by Hugging Face's `generate`, and through a KV pool in chunks, batched and scattered."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from gpu.batch import BatchBuilder, BlockTables, SequenceWork
from gpu.models import PagedModel
from gpu.pool import KVPool


def prompts(vocab_size: int, lengths: list[int]) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab_size, length) for length in lengths]


def by_generate(model: PreTrainedModel, prompt: NDArray[np.int64], num_outputs: int) -> tuple[list[int], float]:
    """The tokens, and the smallest distance between the two largest logits: ties would make a comparison void."""
    generator: Any = model
    result = generator.generate(
        torch.from_numpy(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=num_outputs,
        output_logits=True,
        return_dict_in_generate=True,
    )
    largest, second = torch.stack(result.logits).topk(2).values.unbind(-1)
    return result.sequences[0, len(prompt) :].tolist(), float((largest - second).min())


def by_pages(
    model: PagedModel, prompts: list[NDArray[np.int64]], num_outputs: int, block_size: int, max_chunk: int
) -> list[list[int]]:
    """Tokens of all prompts, served together.

    A sequence starts two steps after the one before it and computes its prompt in chunks of random size, so chunks mix
    with decodes, and chunks of one token with both. Blocks are random, slots hold NaN until they are written.
    """
    rng = np.random.default_rng(2)
    max_blocks = [-(-(len(prompt) + num_outputs) // block_size) for prompt in prompts]
    pool = KVPool(model.spec, sum(max_blocks) + 5, block_size)
    pool.blocks.fill_(torch.nan)
    free = rng.permutation(pool.num_blocks).tolist()
    tables = BlockTables(len(prompts), max(max_blocks))
    builder = BatchBuilder(tables, block_size, sum(map(len, prompts)), model.device)
    tokens = [prompt.tolist() for prompt in prompts]
    computed = [0] * len(prompts)
    blocks: list[list[int]] = [[] for _ in prompts]
    rows = [tables.take() for _ in prompts]
    step = 0
    while any(len(tokens[i]) < len(prompt) + num_outputs for i, prompt in enumerate(prompts)):
        batch = []
        for i, prompt in enumerate(prompts):
            if 2 * i > step or len(tokens[i]) == len(prompt) + num_outputs:
                continue
            num_tokens = min(len(tokens[i]) - computed[i], int(rng.integers(1, max_chunk + 1)))
            while len(blocks[i]) * block_size < computed[i] + num_tokens:
                blocks[i].append(free.pop())
            batch.append((i, num_tokens))
        works = [
            SequenceWork(rows[i], np.array(tokens[i][computed[i] : computed[i] + n]), computed[i] + n, blocks[i])
            for i, n in batch
        ]
        logits = model.forward(builder.build(works), pool)
        assert torch.isfinite(logits).all()
        for (i, num_tokens), row in zip(batch, logits, strict=True):
            computed[i] += num_tokens
            if computed[i] == len(tokens[i]):
                tokens[i].append(int(row.argmax()))
        step += 1
    return [sequence[len(prompt) :] for sequence, prompt in zip(tokens, prompts, strict=True)]
