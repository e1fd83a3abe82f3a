"""Bytes: what a model's weights and KV take, and how many blocks of KV a deployment has room for.

The rules are those of vLLM (0.19), which its users' logs can be checked against; each is cited where it stands.
Sizes in parameters are those of the weight matrices: biases and norms, below 0.2 % of a model, enter only through
the published parameter count. Nothing here knows of requests; who may have the blocks is `memory/`'s business.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

from sim.hardware import Deployment, Hardware
from workloads.errors import UserError

BITS: dict[str, Fraction] = {
    "float32": Fraction(32),
    "bfloat16": Fraction(16),
    "float16": Fraction(16),
    "fp8": Fraction(8),
    "fp8_e4m3": Fraction(8),
    "fp8_e5m2": Fraction(8),
    "int8": Fraction(8),
    "mxfp4": Fraction(17, 4),  # 4 bits each, and one 8-bit scale for 32 (OCP Microscaling Formats v1.0)
    "int4": Fraction(33, 8),  # 4 bits each, and one 16-bit scale for 128 (AWQ and GPTQ, group size 128)
}
GIB = 1 << 30
PAGE_BYTES = (64 << 10, 128 << 10, 256 << 10, 2 << 20)  # physical pages that vAttention's driver maps


@dataclass(frozen=True)
class SlidingWindow:
    """Layers that attend to the last `tokens` positions only.

    Args:
        tokens: the window, the current token included.
        pattern: `sliding` or `full` for each layer, repeated down the model; one entry serves all layers.
    """

    tokens: int
    pattern: tuple[str, ...] = ("sliding",)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"model.sliding_window.tokens is {self.tokens}; expected a whole number of at least 1.")
        if not self.pattern or set(self.pattern) - {"sliding", "full"}:
            raise UserError(f"model.sliding_window.pattern is {list(self.pattern)}; expected sliding or full, each.")


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1): all heads share one latent per token.

    Args:
        kv_lora_rank: elements of the latent.
        qk_rope_head_dim: elements of the key part that carries positions, kept beside the latent.
        qk_nope_head_dim: elements of a head's key that carry none.
        v_head_dim: elements of a head's value.
        q_lora_rank: elements of the queries' own latent, None if queries are projected directly.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None


@dataclass(frozen=True)
class Experts:
    """Mixture of experts in place of the MLP.

    Args:
        num_experts: routed experts of a layer.
        experts_per_token: routed experts that a token visits.
        intermediate_size: width of one expert.
        shared_intermediate_size: width of the expert that every token visits as well, 0 if none.
        dense_layers_first: layers at the bottom that keep a plain MLP.
        weight_dtype: of the routed experts, a key of `BITS`; None is the model's.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    dense_layers_first: int = 0
    weight_dtype: str | None = None


@dataclass(frozen=True)
class ModelSpec:
    """The shapes of a decoder-only transformer.

    Args:
        name: as in messages and tables.
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; `num_heads` for MHA, 1 for MQA, left aside under latent attention.
        head_dim: elements of a head. Not always `hidden_size / num_heads`: read it from the model's config.
        intermediate_size: width of the MLP.
        vocab_size: rows of the embedding.
        max_model_len: positions, in tokens.
        gated_mlp: whether the MLP has three matrices (gate, up, down) or two.
        tied_embeddings: whether the output projection is the embedding.
        dtype: of activations, embeddings and, if `auto`, KV.
        weight_dtype: of the layers' matrices, a key of `BITS`; None is `dtype`.
        num_parameters: as published, all included; None counts the matrices.
        sliding_window: None if every layer attends to everything.
        latent_attention: None if K and V are stored head by head.
        experts: None if the model is dense.

    Raises:
        UserError: a size below 1, an unknown dtype, or heads that do not group.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    gated_mlp: bool = True
    tied_embeddings: bool = False
    dtype: str = "bfloat16"
    weight_dtype: str | None = None
    num_parameters: int | None = None
    sliding_window: SlidingWindow | None = None
    latent_attention: LatentAttention | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise UserError(f"model {self.name}: {key} is {value}; expected a whole number of at least 1.")
        for dtype in (self.dtype, self.layer_dtype, self.expert_dtype):
            if dtype not in BITS:
                raise UserError(f"model {self.name}: no dtype {dtype}; expected one of {', '.join(BITS)}.")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model {self.name}: {self.num_heads} heads cannot share {self.num_kv_heads} KV heads; "
                f"num_heads must be a multiple of num_kv_heads."
            )

    @property
    def layer_dtype(self) -> str:
        return self.weight_dtype or self.dtype

    @property
    def expert_dtype(self) -> str:
        return (self.experts.weight_dtype if self.experts else None) or self.layer_dtype

    @property
    def num_cached_heads(self) -> int:
        """KV heads in the cache of one layer; a latent counts as one."""
        return 1 if self.latent_attention else self.num_kv_heads

    @property
    def num_sliding_layers(self) -> int:
        return sum(map(self.is_sliding, range(self.num_layers)))

    def is_sliding(self, layer: int) -> bool:
        pattern = self.sliding_window.pattern if self.sliding_window else ("full",)
        return pattern[layer % len(pattern)] == "sliding"

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense_layers_first

    def attention_parameters(self, tensor_parallel: int = 1) -> int:
        """Elements of one layer's attention matrices on one rank; KV heads and latents are replicated as cached."""
        heads, hidden = self.num_heads // tensor_parallel, self.hidden_size
        if (latent := self.latent_attention) is None:
            kv_heads = kv_heads_per_rank(self, tensor_parallel)
            return 2 * hidden * (heads + kv_heads) * self.head_dim
        query = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        queries = hidden * query if latent.q_lora_rank is None else latent.q_lora_rank * (hidden + query)
        down = hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)
        up = latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        return queries + down + up + heads * latent.v_head_dim * hidden

    def mlp_parameters(self, layer: int, tensor_parallel: int = 1) -> int:
        """Elements of one layer's matrices outside attention that every token visits, on one rank."""
        width, router = self.intermediate_size, 0
        if self.experts is not None and self.has_experts(layer):
            width, router = self.experts.shared_intermediate_size, self.hidden_size * self.experts.num_experts
        return (3 if self.gated_mlp else 2) * self.hidden_size * width // tensor_parallel + router

    def expert_parameters(self, tensor_parallel: int = 1) -> int:
        """Elements of one routed expert on one rank; 0 for a dense model."""
        width = self.experts.intermediate_size if self.experts else 0
        return (3 if self.gated_mlp else 2) * self.hidden_size * width // tensor_parallel

    def embedding_parameters(self) -> int:
        """Elements of the embedding; the output projection has as many."""
        return self.vocab_size * self.hidden_size

    def matrix_parameters(self) -> int:
        """Elements of all weight matrices: a parameter count from the shapes, without biases and norms."""
        total = self.embedding_parameters() * (1 if self.tied_embeddings else 2)
        for layer in range(self.num_layers):
            total += self.attention_parameters() + self.mlp_parameters(layer)
            if self.experts is not None and self.has_experts(layer):
                total += self.experts.num_experts * self.expert_parameters()
        return total


@dataclass(frozen=True)
class Stage:
    """What one GPU of a pipeline stage holds.

    Args:
        layers: the stage's layers.
        weight_bytes: weights on each of the stage's GPUs.
        kv_bytes_per_token: KV of one token on each of them, every layer taken as full.
    """

    layers: range
    weight_bytes: int
    kv_bytes_per_token: int


def kv_heads_per_rank(model: ModelSpec, tensor_parallel: int) -> int:
    """KV heads that one rank stores of each layer: its share, or one, replicated, where the degree exceeds the heads.

    vLLM, `ModelConfig.get_num_kv_heads`: max(1, kv_heads // tensor_parallel). A latent is replicated on every rank.

    Raises:
        UserError: the degree does not divide the query heads, or neither divides nor is a multiple of the KV heads.
    """
    heads = model.num_cached_heads
    if model.num_heads % tensor_parallel:
        raise UserError(
            f"tensor_parallel is {tensor_parallel}, which does not divide the {model.num_heads} heads of {model.name}; "
            f"choose a divisor."
        )
    if heads % tensor_parallel and tensor_parallel % heads:
        raise UserError(
            f"tensor_parallel is {tensor_parallel}, but {model.name} has {heads} KV heads; "
            f"choose a divisor or a multiple of {heads}."
        )
    return max(1, heads // tensor_parallel)


def kv_bytes_per_layer(model: ModelSpec, deployment: Deployment) -> int:
    """KV of one token in one layer on one rank, bytes: K and V of its heads, or one latent with no factor 2."""
    latent = model.latent_attention
    elements = latent.kv_lora_rank + latent.qk_rope_head_dim if latent else 2 * model.head_dim
    dtype = model.dtype if deployment.kv_cache_dtype == "auto" else deployment.kv_cache_dtype
    heads = kv_heads_per_rank(model, deployment.tensor_parallel)
    return _bytes(heads * elements, dtype)


def kv_bytes_per_token(model: ModelSpec, deployment: Deployment) -> int:
    """KV of one token over all layers and GPUs, bytes, if every layer were full; a replicated head counts each time."""
    return kv_bytes_per_layer(model, deployment) * model.num_layers * deployment.tensor_parallel


def page_group_tokens(model: ModelSpec, deployment: Deployment, page_bytes: int) -> int:
    """Tokens whose K, or V, of one layer fits into one physical page on each GPU (vAttention, arXiv 2405.04437).

    K and V of every layer lie in a buffer of their own and grow together: a page for each of them is a page group, and
    holds this many tokens. Where a token's bytes do not divide a page, the rest of the page is left empty.

    Args:
        page_bytes: 64, 128 or 256 KiB, which take the authors' driver, or 2 MiB, which CUDA's own has.

    Raises:
        UserError: another size, one that holds no token, or a model that keeps no K and V apart.
    """
    if page_bytes not in PAGE_BYTES:
        sizes = ", ".join(f"{size}" for size in PAGE_BYTES)
        raise UserError(f"memory.page_bytes is {page_bytes}; expected one of {sizes}.")
    if model.latent_attention:
        raise UserError(f"{model.name} keeps one latent for K and V, and vAttention a buffer for each; choose paged.")
    tokens = page_bytes // (kv_bytes_per_layer(model, deployment) // 2)
    if tokens < 1:
        raise UserError(f"memory.page_bytes is {page_bytes}, which holds no token of {model.name}; take a larger one.")
    return tokens


def sequence_kv_bytes(model: ModelSpec, deployment: Deployment, num_tokens: int, block_size: int) -> int:
    """KV of a sequence of `num_tokens` in blocks of `block_size` over all GPUs, bytes.

    A sliding layer needs no more blocks than its window can touch. A window of w tokens touches ceil((w - 1) / block)
    + 1 blocks at most, one more than fit it exactly, because it straddles a boundary (vLLM,
    `SlidingWindowSpec.max_memory_usage_bytes`).
    """
    blocks = -(-num_tokens // block_size)
    num_sliding = model.num_sliding_layers
    in_window = min(blocks, -(-(model.sliding_window.tokens - 1) // block_size) + 1) if model.sliding_window else 0
    layer_blocks = (model.num_layers - num_sliding) * blocks + num_sliding * in_window
    return layer_blocks * block_size * kv_bytes_per_layer(model, deployment) * deployment.tensor_parallel


def stages(model: ModelSpec, deployment: Deployment) -> list[Stage]:
    """The pipeline stages, first to last.

    Layers are split as vLLM does (`distributed/utils.py`, `get_pp_indices`): evenly, what is left over one each from
    the last stage but one backwards. The first stage has the embedding, the last the output projection.

    Raises:
        UserError: more stages than layers, or heads that the tensor-parallel degree does not split.
    """
    degree = deployment.pipeline_parallel
    each, left = divmod(model.num_layers, degree)
    if each == 0:
        raise UserError(
            f"pipeline_parallel is {degree}, but {model.name} has {model.num_layers} layers; choose at most that many."
        )
    sizes = [each] * degree
    for i in range(left):
        sizes[-2 - i] += 1
    per_layer = kv_bytes_per_layer(model, deployment)
    result, start = [], 0
    for size in sizes:
        layers = range(start, start + size)
        result.append(Stage(layers, _stage_weight_bytes(model, deployment, layers), size * per_layer))
        start += size
    return result


def layer_weight_bytes(model: ModelSpec, layer: int, tensor_parallel: int) -> int:
    """Weights of one layer on one rank, bytes, all experts included."""
    size = _bytes(
        model.attention_parameters(tensor_parallel) + model.mlp_parameters(layer, tensor_parallel), model.layer_dtype
    )
    if model.experts is not None and model.has_experts(layer):
        size += _bytes(model.experts.num_experts * model.expert_parameters(tensor_parallel), model.expert_dtype)
    return size


def _stage_weight_bytes(model: ModelSpec, deployment: Deployment, layers: range) -> int:
    tensor_parallel = deployment.tensor_parallel
    size = sum(layer_weight_bytes(model, layer, tensor_parallel) for layer in layers)
    embedding = _bytes(model.embedding_parameters(), model.dtype) // tensor_parallel  # split by vocabulary
    is_first, is_last = layers.start == 0, layers.stop == model.num_layers
    if is_first:
        size += embedding
    if is_last and not (is_first and model.tied_embeddings):
        size += embedding
    # Biases, norms, an image encoder: small and of no known place, so spread evenly.
    rest = (model.num_parameters or 0) - model.matrix_parameters()
    return size + (_bytes(rest, model.dtype) // deployment.num_gpus if rest > 0 else 0)


def non_kv_bytes(model: ModelSpec, deployment: Deployment, max_num_seqs: int) -> int:
    """What an engine takes of each GPU besides weights and KV when it sizes its pool, bytes.

    vLLM runs the model once on dummy input, samples for `max_num_seqs` rows, and counts the peak. Sampling is the
    peak: the published profiles of the llm-d project's planner (vLLM 0.11 on H100, whose server default is 1,024 rows)
    give 4.76 GiB for Llama-3.1-8B and 4.84 for 70B on two GPUs (vocabulary 128,256), 5.56 and 5.64 for Qwen3-0.6B and
    32B (151,936), 7.38 for both gpt-oss (201,088): whatever the model, 38 to 39 bytes for each row and each entry of
    the vocabulary. Libraries outside the allocator take 0.13 GiB on one GPU and 0.55 GiB where there is communication
    (same profiles).

    Args:
        max_num_seqs: rows of the dry run.
    """
    if deployment.non_kv_memory_bytes is not None:
        return deployment.non_kv_memory_bytes
    libraries = 0.13 if deployment.num_gpus == 1 else 0.55
    return 39 * max_num_seqs * model.vocab_size + int(libraries * GIB)


def pool_blocks(
    model: ModelSpec,
    hardware: Hardware,
    deployment: Deployment,
    block_size: int,
    num_blocks: int | None = None,
    max_num_seqs: int = 256,
    groups: Collection[Collection[int]] = (),
) -> int:
    """Blocks of KV in the pool: the same on every rank, so the stage with least room for its layers decides.

    Args:
        block_size: tokens of a block.
        num_blocks: a count from an engine's log; taken literally.
        max_num_seqs: rows of the dry run, see `non_kv_bytes`; vLLM's default is 256, on GPUs of 70 GiB and more 1,024.
        groups: layers that share a block table, if not all do (`layer_groups.py`).

    Raises:
        UserError: the weights leave no room, or not one block fits.
    """
    if block_size < 1:
        raise UserError(f"memory.block_size is {block_size}; expected a whole number of at least 1.")
    parts = stages(model, deployment)
    if num_blocks is not None:
        if num_blocks < 1:
            raise UserError(f"memory.num_blocks is {num_blocks}; expected a whole number of at least 1.")
        return num_blocks
    others = non_kv_bytes(model, deployment, max_num_seqs)
    sizes = [block_size * kv_bytes_per_layer(model, deployment) * _layers_of_block(stage, groups) for stage in parts]
    fits = min(
        _kv_room(model, hardware, deployment, stage, others) // size for stage, size in zip(parts, sizes, strict=True)
    )
    if fits < 1:
        need = max(sizes)
        raise UserError(
            f"{model.name} on {hardware.name}: not one block of {block_size} tokens ({need:,} bytes on a GPU) fits; "
            f"choose a smaller memory.block_size, more GPUs or a higher gpu_memory_utilization."
        )
    return fits


def _layers_of_block(stage: Stage, groups: Collection[Collection[int]]) -> int:
    """Layers of a stage that a block has room for: those of the largest group, as blocks of all groups are alike."""
    return max((sum(layer in stage.layers for layer in group) for group in groups), default=len(stage.layers))


def host_blocks(
    model: ModelSpec, deployment: Deployment, block_size: int, swap_space: float, name: str = "swap_space"
) -> int:
    """Blocks that fit into host memory set aside for them.

    Args:
        block_size: tokens of a block.
        swap_space: GiB of host memory for each GPU; the stage with most layers decides.
        name: of the option, for messages.

    Raises:
        UserError: a negative size.
    """
    if swap_space < 0:
        raise UserError(f"memory.{name} is {swap_space}; expected a number of GiB, 0 or more.")
    block_bytes = block_size * max(stage.kv_bytes_per_token for stage in stages(model, deployment))
    return int(swap_space * GIB) // block_bytes


def _kv_room(model: ModelSpec, hardware: Hardware, deployment: Deployment, stage: Stage, others: int) -> int:
    """Bytes for KV on a GPU of `stage`."""
    if deployment.kv_cache_memory_bytes is not None:
        return deployment.kv_cache_memory_bytes
    of_free = deployment.free_gpu_memory_fraction
    share = deployment.gpu_memory_utilization if of_free is None else 1.0
    usable = int(hardware.memory_bytes * share)
    room = usable - stage.weight_bytes - others
    if room < 0:
        means = f"gpu_memory_utilization={share}" if of_free is None else "all of its memory"
        raise UserError(
            f"{model.name} does not fit on {deployment.num_gpus} x {hardware.name}: {stage.weight_bytes / GIB:.1f} GiB "
            f"of weights and {others / GIB:.1f} GiB besides exceed {usable / GIB:.1f} GiB "
            f"({means}) by {-room / GIB:.1f} GiB on each GPU; "
            f"raise tensor_parallel or pipeline_parallel, or take larger hardware."
        )
    return room if of_free is None else int(room * of_free)


def model_len(model: ModelSpec, deployment: Deployment) -> int:
    """The longest sequence in tokens, prompt and output together.

    Raises:
        UserError: a limit beyond the model's positions.
    """
    if deployment.max_model_len is None:
        return model.max_model_len
    if deployment.max_model_len > model.max_model_len:
        raise UserError(
            f"max_model_len is {deployment.max_model_len}, but {model.name} has {model.max_model_len} positions; "
            f"choose at most that many."
        )
    return deployment.max_model_len


def _bytes(elements: int, dtype: str) -> int:
    """Bytes that `elements` take, rounded up."""
    return -(-elements * BITS[dtype] // 8)
