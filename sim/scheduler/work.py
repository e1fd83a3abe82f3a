"""What the sequences of a plan compute together: the sums that a timer prices."""

from __future__ import annotations

from sim.memory.interface import KVMemory
from sim.plan import StepPlan, StepWork
from sim.scheduler.steady import SteadyDecodes


def work_of(plan: StepPlan, steady: SteadyDecodes, memory: KVMemory) -> StepWork:
    """Sums up the first step of a plan, of which everything else is decided.

    Args:
        plan: its batch, how many are steady in it, and its copies.
        steady: those that are.
        memory: says how many block-table entries a kernel looks up.
    """
    count = plan.steady
    decodes = generated = count
    decode_context, decode_blocks, longest = (steady.context, steady.entries, steady.longest()) if count else (0, 0, 0)
    if not plan.batch:
        return StepWork(count, count, 0, 0, 0, count, decode_context, decode_blocks, count, 0, longest)
    prefill_tokens = prefill_pairs = prefill_context = 0
    for sequence, tokens in plan.batch:
        context = sequence.computed
        generated += context == sequence.known
        if tokens == 1:
            decodes += 1
            decode_context += context
            longest = max(longest, context)
            decode_blocks += memory.table_entries(sequence)
        else:
            prefill_tokens += tokens
            prefill_context += context
            prefill_pairs += tokens * (context - tokens) + tokens * (tokens + 1) // 2
    return StepWork(
        count + len(plan.batch),
        decodes + prefill_tokens,
        prefill_tokens,
        prefill_pairs,
        prefill_context,
        decodes,
        decode_context,
        decode_blocks,
        generated,
        len(plan.copies) * memory.block_size,
        longest,
    )
