"""The time of a step from measured kernel times of the same GPU and model (`kernel_tables.py`).

A step is: embedding; for each transformer layer its dense layers, its attention and, with tensor parallelism, two
all-reduces; final norm, output projection and sampler; and what the host adds.

- Times between measured points are linear in the quantity itself: decode attention is linear in the total context, so
  any other axis would bend it. Beyond the last point the last segment is continued, and `notices` says so.
- **Attention** is one call for the whole batch. With one prefill chunk the table is asked for just that batch at the
  mean context of the decodes: mixed batches cost more than their parts. The tables know no batch of several chunks: the
  one with most work is priced in the mix, each other adds what it costs by itself, less the least that any call costs.
- **Uneven contexts**: `skew_share` of what the skew table says they cost more than even ones.
- **Experts**: as many are read as T tokens that each choose k of E independently and evenly touch on average,
  E * (1 - (1 - k / E) ** T). Where the experts were measured as a dense layer (`moe…`), that layer is all there is.
- **All-reduces**: a latency each, and the activations once over the link (a ring of n moves 2 (n - 1) / n of them).

Not in the tables, and free here: copies of shared blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path

from sim.hardware import Deployment
from sim.kv_layout import BITS, ModelSpec
from sim.plan import StepPlan, StepWork
from sim.timing.kernel_tables import Chunk, read_kernel_tables
from sim.timing.vidur_tables import is_vidur, read_vidur_tables
from workloads.errors import UserError

ONCE = ("embedding", "final_layernorm")  # in a step; the other dense layers are in every transformer layer …
TWICE = ("layernorm",)  # … and this one before attention and before the MLP


class Profile:
    """Prices steps by tables.

    Args:
        model: what was measured; its layers, and its activations on the link, count.
        deployment: how it is spread over GPUs.
        path: the folder with the tables of that model on that GPU, at that degree of tensor parallelism.
        step_overhead: seconds that the host adds to each step.
        allreduce_latency: seconds of an all-reduce of nothing.
        allreduce_bandwidth: bytes a second that an all-reduce of much reaches.
        skew_share: share of the skew table's extra time that is charged, 0 to 1.

    Raises:
        UserError: a table that is missing or malformed, a number out of range, or pipeline parallelism.
    """

    def __init__(
        self,
        model: ModelSpec,
        deployment: Deployment,
        path: str,
        step_overhead: float,
        allreduce_latency: float,
        allreduce_bandwidth: float,
        skew_share: float,
    ) -> None:
        for key, value in (("step_overhead", step_overhead), ("allreduce_latency", allreduce_latency)):
            if value < 0:
                raise UserError(f"timing.{key} is {value}; expected a number of seconds, 0 or more.")
        if allreduce_bandwidth <= 0:
            raise UserError(f"timing.allreduce_bandwidth is {allreduce_bandwidth}; expected bytes a second, above 0.")
        if not 0 <= skew_share <= 1:
            raise UserError(f"timing.skew_share is {skew_share}; expected a share from 0 to 1.")
        if deployment.pipeline_parallel > 1:
            raise UserError("kernel tables are of whole models: timing=profile needs pipeline_parallel=1.")
        folder = Path(path).expanduser()
        degree = deployment.tensor_parallel
        tables = read_vidur_tables(folder, degree) if is_vidur(folder) else read_kernel_tables(folder)
        if tables.experts is not None and model.experts is None:
            raise UserError(f"{folder} has the table of a mixture of experts; {model.name} is none. Choose its model.")
        if tables.experts is None and model.experts is not None and not any("moe" in name for name in tables.dense):
            raise UserError(
                f"{folder} has no moe.csv, nor a dense layer with moe in its name, as {model.name} needs; choose the "
                "model that was measured."
            )
        self._tables = tables
        self._experts = model.experts
        self._layers = model.num_layers
        self._expert_layers = sum(map(model.has_experts, range(model.num_layers)))
        self._overhead = step_overhead
        self._skew_share = skew_share if tables.skew is not None else 0.0
        reduces = 2 * model.num_layers if degree > 1 else 0
        activations = model.hidden_size * float(BITS[model.dtype]) / 8
        self._latency = reduces * allreduce_latency
        self._token_transfer = reduces * 2 * (degree - 1) / degree * activations / allreduce_bandwidth
        self._dense: dict[int, float] = {}  # tokens -> seconds, once asked for
        self._heads: dict[int, float] = {}  # sequences -> seconds
        self._beyond: dict[str, float] = {}  # quantity -> the most that was asked for
        self._limits = self._measured_limits()

    @property
    def notices(self) -> list[str]:
        """What had to be extrapolated so far, a sentence each."""
        return [
            f"{quantity}: {asked:,.0f} were asked for, {self._limits[quantity]:,.0f} are measured; continued linearly"
            for quantity, asked in sorted(self._beyond.items())
        ]

    def durations(self, plan: StepPlan) -> list[float]:
        """Seconds of each of the plan's steps; within a leap only attention differs."""
        work = plan.work
        rest, decodes, layers = self._all_but_attention(work), work.decode_sequences, self._layers
        if not plan.needs:
            chunks = [(tokens, sequence.computed - tokens) for sequence, tokens in plan.batch if tokens > 1]
            return [rest + layers * self._attention(chunks, decodes, work.decode_context, work.decode_longest)]
        steps = zip(range(plan.repeat), count(work.decode_context, decodes), count(work.decode_longest), strict=False)
        return [rest + layers * self._attention((), decodes, context, longest) for _, context, longest in steps]

    def _attention(self, chunks: Iterable[Chunk], decodes: int, context: int, longest: int) -> float:
        """One layer: `decodes` with `context` tokens together, the longest of them with `longest`, beside `chunks`."""
        attention, (main, *others) = self._tables.attention, _by_work(chunks)
        mean = context / decodes if decodes else 0.0
        self._note_attention(main, decodes, mean)
        seconds = attention.one_chunk(main, decodes, mean)
        if self._skew_share and decodes > 1 and longest > mean:
            assert self._tables.skew is not None
            even = attention.one_chunk(main, decodes, longest)
            alpha = self._tables.skew.alpha(main, decodes, mean, longest)
            seconds += self._skew_share * max(0.0, alpha * (even - seconds))
        for chunk in others:
            assert chunk is not None
            seconds += attention.further_chunk(chunk)
        return seconds

    def _all_but_attention(self, work: StepWork) -> float:
        tokens, sequences = work.num_tokens, work.num_sequences
        dense, heads = self._dense.get(tokens), self._heads.get(sequences)
        if dense is None:
            dense = self._dense[tokens] = self._dense_seconds(tokens)
        if heads is None:
            heads = self._heads[sequences] = sum(curve(sequences) for curve in self._tables.per_sequence.values())
            self._note("sequences of a step", sequences)
        return dense + heads + self._latency + tokens * self._token_transfer + self._overhead

    def _dense_seconds(self, tokens: int) -> float:
        self._note("tokens of a step", tokens)
        seconds = 0.0
        for layer, curve in self._tables.dense.items():
            times = 1 if layer in ONCE else self._layers * (2 if layer in TWICE else 1)
            seconds += times * curve(tokens)
        if self._tables.experts is not None and (experts := self._experts) is not None:
            share = experts.experts_per_token / experts.num_experts
            touched = experts.num_experts * (1 - (1 - share) ** tokens)
            seconds += self._expert_layers * self._tables.experts(tokens, touched)
        return seconds

    def _measured_limits(self) -> dict[str, float]:
        tables = self._tables
        prefill, decode, mixed = tables.attention.prefill.lasts, tables.attention.decode.lasts, tables.attention.mixed
        return {
            "tokens of a step": min(curve.last for curve in tables.dense.values()),
            "sequences of a step": min(curve.last for curve in tables.per_sequence.values()),
            "tokens of a prefill chunk": prefill[0],
            "computed tokens before a prefill chunk": prefill[1],
            "sequences that decode": decode[0],
            "sequences that decode beside a prefill chunk": decode[0] if mixed is None else mixed.lasts[2],
            "mean context of decodes": decode[1],
        }

    def _note_attention(self, chunk: Chunk | None, decodes: int, mean: float) -> None:
        if chunk is not None:
            self._note("tokens of a prefill chunk", chunk[0])
            self._note("computed tokens before a prefill chunk", chunk[1])
        if decodes:
            beside = "" if chunk is None else " beside a prefill chunk"
            self._note(f"sequences that decode{beside}", decodes)
            self._note("mean context of decodes", mean)

    def _note(self, quantity: str, asked: float) -> None:
        if asked > self._limits[quantity] and asked > self._beyond.get(quantity, 0):
            self._beyond[quantity] = asked


def _by_work(chunks: Iterable[Chunk]) -> list[Chunk | None]:
    """The chunks, the one with most query-key pairs first; None alone if there is none."""
    return [*sorted(chunks, key=lambda chunk: -chunk[0] * (chunk[1] + chunk[0] / 2))] or [None]
