"""The time of a step from the model's arithmetic and the device's published peaks (Williams et al., CACM 2009).

A step is a sum of parts, and each part takes the longer of its compute and its memory traffic, on one GPU of the
tensor-parallel group (all do the same at the same time):

- **dense**: 2 FLOPs for each weight and token, against every weight read once. Of a mixture of experts only the
  experts touched are read. If T tokens each visit k of E experts independently and evenly, the expected number is
  E * (1 - (1 - k / E) ** T); real routers are less even and touch fewer.
- **decode attention**: the KV of every token in context is read once, against 4 FLOPs for each query-head element and
  context token (under latent attention, absorbed: 2 * (2 * rank + rope) for each head). A paged kernel also reads
  4 bytes of block table for each block, KV head and layer; this is the block size's only effect.
- **prefill attention**: 4 FLOPs for each query-head element and query-key pair, against one read of the chunk's
  context.
- **output projection**: one row for each sequence, against one read of the matrix.
- **all-reduces**: two a layer, each a latency plus a ring's 2 (tp - 1) / tp of the activations over the link.
- **pipeline**: one batch is in flight, so the stages take turns: the sum over all layers and a transfer of the
  activations between stages. A pipeline then saves memory and no time; engines that keep more batches in flight gain
  throughput, not latency.
- **copies** of shared blocks that are written to: every byte read once and written once.
- **step and sequence overhead**: host work that is not hidden behind the GPU, for the step and for each sequence in it.

A sliding layer reads at most its window. `StepWork` has only sums over the batch, so the bound is applied to the sums:
min(context, sequences * window) for decodes, min(pairs, tokens * window) and min(context, tokens + sequences * window)
for chunks. By concavity these are never below the exact sums, and exact where all contexts lie on one side of the
window. Left out: norms, activations, sampling, KV writes and the up-projection of cached latents in a prefill; they are
what the efficiencies stand for. Weights in fewer bits save traffic but compute at the 16-bit peak.
"""

from __future__ import annotations

import math
from itertools import accumulate, count

from sim.hardware import Deployment, Hardware
from sim.kv_layout import BITS, ModelSpec, kv_bytes_per_layer, kv_heads_per_rank, layer_weight_bytes, stages
from sim.plan import StepPlan, StepWork, WorkTimer
from workloads.errors import UserError

BLOCK_TABLE_ENTRY = 4  # bytes: an int32


class Roofline(WorkTimer):
    """Prices steps by arithmetic alone.

    Args:
        model: what is computed.
        hardware: one GPU's peaks.
        deployment: how the model is spread over GPUs; only its parallel degrees and KV dtype matter.
        compute_efficiency: reached share of peak FLOPs in dense layers, above 0 and at most 1.
        bandwidth_efficiency: reached share of peak memory bandwidth when weights are read.
        attention_compute_efficiency: reached share of peak FLOPs in attention.
        attention_bandwidth_efficiency: reached share of peak memory bandwidth when KV is read or copied.
        interconnect_efficiency: reached share of the link's peak.
        allreduce_latency: seconds of an all-reduce of nothing.
        step_overhead: seconds of host time that each step adds.
        sequence_overhead: seconds of host time that each sequence adds to a step.

    Raises:
        UserError: a share outside (0, 1], a negative time, or degrees that do not split the model.
    """

    def __init__(
        self,
        model: ModelSpec,
        hardware: Hardware,
        deployment: Deployment,
        compute_efficiency: float,
        bandwidth_efficiency: float,
        attention_compute_efficiency: float,
        attention_bandwidth_efficiency: float,
        interconnect_efficiency: float,
        allreduce_latency: float,
        step_overhead: float,
        sequence_overhead: float = 0.0,
    ) -> None:
        shares = {
            "compute_efficiency": compute_efficiency,
            "bandwidth_efficiency": bandwidth_efficiency,
            "attention_compute_efficiency": attention_compute_efficiency,
            "attention_bandwidth_efficiency": attention_bandwidth_efficiency,
            "interconnect_efficiency": interconnect_efficiency,
        }
        for key, share in shares.items():
            if not 0 < share <= 1:
                raise UserError(f"timing.{key} is {share}; expected a share above 0 and at most 1.")
        times = {
            "allreduce_latency": allreduce_latency,
            "step_overhead": step_overhead,
            "sequence_overhead": sequence_overhead,
        }
        for key, time in times.items():
            if time < 0:
                raise UserError(f"timing.{key} is {time}; expected a number of seconds, 0 or more.")
        stages(model, deployment)  # says so if the degrees do not split the model
        flops, bandwidth = hardware.flops_per_second, hardware.bandwidth
        self._overhead, self._sequence_overhead = step_overhead, sequence_overhead
        self._set_dense(model, deployment.tensor_parallel, flops * compute_efficiency, bandwidth * bandwidth_efficiency)
        self._set_attention(
            model, deployment, flops * attention_compute_efficiency, bandwidth * attention_bandwidth_efficiency
        )
        self._set_communication(
            model, deployment, hardware.interconnect_bandwidth * interconnect_efficiency, allreduce_latency
        )

    def _set_dense(self, model: ModelSpec, tensor_parallel: int, flops: float, bandwidth: float) -> None:
        """Seconds per token and for the weights, of all layers and of the output projection."""
        parameters, weight_bytes, expert_layers = 0, 0, 0
        for layer in range(model.num_layers):
            parameters += model.attention_parameters(tensor_parallel) + model.mlp_parameters(layer, tensor_parallel)
            weight_bytes += layer_weight_bytes(model, layer, tensor_parallel)
            expert_layers += model.has_experts(layer)
        self._log_miss = 0.0  # log of the chance that a token passes an expert by; 0 if none can be
        self._expert_read = 0.0
        if (experts := model.experts) is not None:
            per_expert = model.expert_parameters(tensor_parallel)
            parameters += expert_layers * experts.experts_per_token * per_expert
            expert_bytes = expert_layers * experts.num_experts * per_expert * float(BITS[model.expert_dtype]) / 8
            if experts.experts_per_token < experts.num_experts:
                self._log_miss = math.log1p(-experts.experts_per_token / experts.num_experts)
                self._expert_read = expert_bytes / bandwidth
                weight_bytes -= int(expert_bytes)
        self._token_compute = 2 * parameters / flops
        self._weight_read = weight_bytes / bandwidth
        head = model.embedding_parameters() / tensor_parallel
        self._row_compute = 2 * head / flops
        self._head_read = head * float(BITS[model.dtype]) / 8 / bandwidth

    def _set_attention(self, model: ModelSpec, deployment: Deployment, flops: float, bandwidth: float) -> None:
        """Seconds per query-key pair, per KV token and per block, for full and for sliding layers."""
        heads = model.num_heads // deployment.tensor_parallel
        pair_flops = decode_flops = 4 * heads * model.head_dim
        if (latent := model.latent_attention) is not None:
            pair_flops = 2 * heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim)
            decode_flops = 2 * heads * (2 * latent.kv_lora_rank + latent.qk_rope_head_dim)
        num_sliding = model.num_sliding_layers
        num_full = model.num_layers - num_sliding
        kv_read = kv_bytes_per_layer(model, deployment) / bandwidth
        self._window = model.sliding_window.tokens if model.sliding_window else 0
        self._slot_copy = 2 * kv_read * model.num_layers
        self._full_layers, self._sliding_layers = num_full, num_sliding
        self._pair_compute, self._decode_compute, self._kv_read = pair_flops / flops, decode_flops / flops, kv_read
        entries = kv_heads_per_rank(model, deployment.tensor_parallel) * model.num_layers
        self._block_read = BLOCK_TABLE_ENTRY * entries / bandwidth
        # Then `_decode_attention` is one sum for any context, and a leap can do without asking it for each step.
        self._decode_is_bound_by_reads = not num_sliding and self._decode_compute <= kv_read

    def _set_communication(self, model: ModelSpec, deployment: Deployment, link: float, latency: float) -> None:
        """Seconds a step and a token, of all-reduces and of transfers between stages."""
        degree, hops = deployment.tensor_parallel, deployment.pipeline_parallel - 1
        activations = model.hidden_size * float(BITS[model.dtype]) / 8
        reduces = 2 * model.num_layers if degree > 1 else 0
        self._latency = reduces * latency + hops * latency
        self._token_transfer = (reduces * 2 * (degree - 1) / degree + hops) * activations / link

    def seconds(self, work: StepWork) -> float:
        """Duration of one step in seconds."""
        total = self._all_but_attention(work)
        if work.decode_sequences:
            total += self._decode_attention(work.decode_sequences, work.decode_context, work.decode_blocks)
        if work.prefill_tokens:
            total += self._prefill_attention(work)
        if work.copied_slots:
            total += work.copied_slots * self._slot_copy
        return total

    def durations(self, plan: StepPlan) -> list[float]:
        """Seconds of each of the plan's steps; within a leap only attention differs."""
        work, needs = plan.work, plan.needs
        if not needs:
            return [self.seconds(work)]
        sequences, rest, attention = work.decode_sequences, self._all_but_attention(work), self._decode_attention
        contexts = count(work.decode_context, sequences)
        blocks = accumulate(needs, initial=work.decode_blocks)
        if self._decode_is_bound_by_reads:
            layers, kv_read, block_read = self._full_layers, self._kv_read, self._block_read
            return [
                rest + (layers * context * kv_read + entries * block_read)
                for context, entries in zip(contexts, blocks, strict=False)
            ]
        return [
            rest + attention(sequences, context, entries) for context, entries in zip(contexts, blocks, strict=False)
        ]

    def _all_but_attention(self, work: StepWork) -> float:
        tokens = work.num_tokens
        read = self._weight_read
        if self._log_miss:
            read -= self._expert_read * math.expm1(tokens * self._log_miss)
        compute = tokens * self._token_compute
        total = self._overhead + self._latency + tokens * self._token_transfer + (compute if compute > read else read)
        sequences = work.num_sequences
        compute = sequences * self._row_compute
        return total + sequences * self._sequence_overhead + (compute if compute > self._head_read else self._head_read)

    def _decode_attention(self, sequences: int, kv_tokens: int, blocks: int) -> float:
        context = self._full_layers * kv_tokens
        if self._sliding_layers:
            context += self._sliding_layers * min(kv_tokens, sequences * self._window)
        read = context * self._kv_read + blocks * self._block_read
        compute = context * self._decode_compute
        return compute if compute > read else read

    def _prefill_attention(self, work: StepWork) -> float:
        pairs, context = self._full_layers * work.prefill_pairs, self._full_layers * work.prefill_context
        if self._sliding_layers:
            chunks = max(0, work.num_sequences - work.decode_sequences)
            pairs += self._sliding_layers * min(work.prefill_pairs, work.prefill_tokens * self._window)
            reach = work.prefill_tokens + chunks * self._window
            context += self._sliding_layers * min(work.prefill_context, reach)
        compute, read = pairs * self._pair_compute, context * self._kv_read
        return compute if compute > read else read
