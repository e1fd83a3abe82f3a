"""Whether a model on the paged engine says what it says by itself.

Not every model's code does with attention what its config suggests. So each is asked once, when it is loaded: two short
prompts, whole and with the model's own attention, and again through the pool, in chunks and token by token, in batches
that mix both, with scattered blocks in a pool full of NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu.attention import ScoreRule
from gpu.batch import BatchBuilder, BlockTables, SequenceWork
from gpu.pool import KVPool
from gpu.tokens import PromptTokens
from workloads.errors import UserError
from workloads.request import Request

if TYPE_CHECKING:
    from gpu.models import PagedModel

_BLOCK_SIZE = 16
_TABLES = ((5, 2), (1, 7, 4))  # scattered, in a pool of 8: blocks 0, 3 and 6 belong to nobody
_CHUNKS = ((18, 9), (1, 1), (0, 21), (1, 1), (1, 1))  # tokens that each of the two computes, step by step
_LENGTHS = (21, 33)  # their sums
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest difference from the model's own logits, as a share of their spread about the mean, both root mean square.

Sums in another order differ by some units in the last place, 2^-24, 2^-11 or 2^-8 of a value, in every layer, and
layers pass it on; attention to the wrong tokens differs by as much as attention contributes.
"""
_CLEAR_MARGIN = 8  # tolerances between the two largest logits from which on the largest must be the same


class WindowLog:
    """Notes with which window each layer attends.

    Attributes:
        windows: by layer; 0 is all tokens.
    """

    def __init__(self) -> None:
        self.windows: dict[int, int] = {}

    def attended(self, layer: int, rule: ScoreRule) -> None:
        """Notes one layer."""
        self.windows[layer] = rule.window


def check(model: PagedModel) -> None:
    """Compares the model on the engine with the model by itself; see the module.

    Raises:
        UserError: layers that do not attend, a window that is not the config's, or logits that differ.
    """
    log = WindowLog()
    prompts = PromptTokens(model.spec.vocab_size)
    token_ids = [prompts.of(Request(i, 0.0, length, 1)) for i, length in enumerate(_LENGTHS)]
    try:
        rows, logits = _paged_logits(model, token_ids, log)
    except UserError as error:  # from within the model's code, which does not know the name
        raise UserError(f"model {model.spec.name}: {error}") from None
    _check_layers(model, log)
    own = [model.own_logits(ids) for ids in token_ids]
    reference = torch.stack([own[sequence][position] for sequence, position in rows])
    _check_logits(model, logits, reference)


def _paged_logits(
    model: PagedModel, token_ids: list[NDArray[np.int64]], log: WindowLog
) -> tuple[list[tuple[int, int]], Tensor]:
    """Which (sequence, position) each row of logits is of, and the rows, [rows, vocab]."""
    num_blocks = 1 + max(map(max, _TABLES))
    pool = KVPool(model.spec, num_blocks, _BLOCK_SIZE, device=model.device)
    pool.blocks.fill_(torch.nan)
    tables = BlockTables(len(_TABLES), max(map(len, _TABLES)))
    builder = BatchBuilder(tables, _BLOCK_SIZE, sum(_LENGTHS), model.device)
    table_rows = [tables.take() for _ in _TABLES]
    computed = [0] * len(_TABLES)
    rows, logits = [], []
    for chunks in _CHUNKS:
        works = []
        for i, num_tokens in enumerate(chunks):
            if num_tokens:
                chunk = token_ids[i][computed[i] : computed[i] + num_tokens]
                computed[i] += num_tokens
                works.append(SequenceWork(table_rows[i], chunk, computed[i], _TABLES[i]))
                rows.append((i, computed[i] - 1))
        logits.append(model.forward(builder.build(works), pool, log).float())
    return rows, torch.cat(logits)


def _check_layers(model: PagedModel, log: WindowLog) -> None:
    spec = model.spec
    if silent := sorted(set(range(spec.num_layers)) - log.windows.keys()):
        raise UserError(
            f"model {spec.name}: layers {', '.join(map(str, silent))} never asked for attention, so they keep a state "
            f"that the engine does not; choose a model whose layers all store keys and values."
        )
    for layer, window in log.windows.items():
        expected = spec.sliding_window.tokens if spec.sliding_window and spec.is_sliding(layer) else 0
        if window != expected:
            raise UserError(
                f"model {spec.name}: layer {layer} attends to {window or 'all'} tokens where its config says "
                f"{expected or 'all'}; the engine cannot tell which is right, choose another model."
            )


def _check_logits(model: PagedModel, logits: Tensor, reference: Tensor) -> None:
    tolerance = _TOLERANCES[model.dtype]
    spread = (reference - reference.mean(-1, keepdim=True)).square().mean().sqrt().item()
    difference = (logits - reference).square().mean().sqrt().item()
    largest, second = reference.topk(2).values.unbind(-1)
    is_clear = largest - second > _CLEAR_MARGIN * tolerance * spread
    same = logits.argmax(-1) == reference.argmax(-1)
    if not difference <= tolerance * spread or not bool(same[is_clear].all()):  # NaN is never <=
        raise UserError(
            f"model {model.spec.name}: on the paged engine its logits differ from its own by {difference:.2g} (root "
            f"mean square; allowed is {tolerance * spread:.2g} in {str(model.dtype).removeprefix('torch.')}), so its "
            f"code does not leave attention to the engine as it should; choose another model."
        )
