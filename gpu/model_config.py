"""Between Hugging Face configs and `ModelSpec`: the shapes of a model, and a model of given shapes.

Also says which configs describe a model that the engine cannot run, before any weights are read. What a config does not
tell is found out by running the model (`self_check.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Starcoder2Config,
)
from transformers.configuration_utils import PretrainedConfig

from sim.kv_layout import Experts, ModelSpec, SlidingWindow
from workloads.errors import UserError

CHOOSE = "Choose a decoder-only model whose layers all store keys and values."
ATTENTION_KINDS = {"full_attention": "full", "attention": "full", "sliding_attention": "sliding"}
# RoPE whose frequencies follow the longest sequence of a batch, so that a sequence's KV depends on its neighbours.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def refuse_unsupported(config: PretrainedConfig, name: str) -> None:
    """Refuses what the engine cannot run.

    Args:
        config: of the model as it will be loaded.
        name: the model, for the message.

    Raises:
        UserError: one line with the reason.
    """
    if (reason := _unsupported(config)) is not None:
        raise UserError(f"model {name} ({config.model_type}) cannot run on the paged engine: {reason}. {CHOOSE}")


def _unsupported(config: PretrainedConfig) -> str | None:
    """Why the engine cannot run such a model, or None."""
    if config.is_encoder_decoder:
        return "it has an encoder"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal language model of this kind"
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        return "it keeps a state other than keys and values (SSM or convolution)"
    if not getattr(model_class, "_supports_attention_backend", False):
        return f"{model_class.__name__} does not support transformers' attention interface"
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        return "it stores a latent in place of keys and values (MLA)"
    if getattr(text, "num_kv_shared_layers", None):
        return "some of its layers read the keys and values of others"
    kinds = set(getattr(text, "layer_types", None) or ())
    if others := sorted(kinds - ATTENTION_KINDS.keys()):
        return f"it has layers of kind {', '.join(others)}"
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        if isinstance(getattr(text, key, None), list | tuple):
            return f"{key} differs from layer to layer"
    if ropes := sorted(BATCH_DEPENDENT_ROPE & set(_rope_types(getattr(text, "rope_parameters", None)))):
        return f"its {', '.join(ropes)} rotary embedding depends on the longest sequence of a batch"
    return None


def _rope_types(parameters: object) -> Iterator[str]:
    """RoPE types of a config's `rope_parameters`: one set for all layers, or one for each kind of layer."""
    if isinstance(parameters, Mapping):
        if isinstance(kind := parameters.get("rope_type"), str):
            yield kind
        for value in parameters.values():
            yield from _rope_types(value)


def spec_of(model: PreTrainedModel, name: str) -> ModelSpec:
    """The shapes of a loaded model.

    Whether the MLP is gated is in no config; it is taken to be what brings the count of matrix elements nearer to
    the true one.
    """
    config = model.config.get_text_config(decoder=True)
    hidden, heads = config.hidden_size, config.num_attention_heads
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    spec = ModelSpec(
        name=name,
        num_layers=config.num_hidden_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        intermediate_size=_first(config, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        tied_embeddings=_is_tied(model),
        dtype=str(model.dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        sliding_window=_sliding_window(config),
        experts=_experts(config),
    )
    candidates = (replace(spec, gated_mlp=gated) for gated in (True, False))
    in_matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    return min(candidates, key=lambda candidate: abs(candidate.matrix_parameters() - in_matrices))


def _first(config: PretrainedConfig, *keys: str) -> int | None:
    """The first of `keys` that has a value other than None and 0."""
    return next((value for key in keys if (value := getattr(config, key, None))), None)


def _is_tied(model: PreTrainedModel) -> bool:
    loaded: Any = model  # its getters are untyped
    output = loaded.get_output_embeddings()
    return output is not None and output.weight is loaded.get_input_embeddings().weight


def _sliding_window(config: PretrainedConfig) -> SlidingWindow | None:
    tokens = getattr(config, "sliding_window", None)
    if not tokens:
        return None
    if (kinds := getattr(config, "layer_types", None)) is None:
        return SlidingWindow(tokens)
    pattern = tuple(ATTENTION_KINDS[kind] for kind in kinds)
    return SlidingWindow(tokens, pattern) if "sliding" in pattern else None


def _experts(config: PretrainedConfig) -> Experts | None:
    num_experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts")
    if num_experts is None:
        return None
    width = _first(config, "moe_intermediate_size", "intermediate_size")
    per_token = _first(config, "num_experts_per_tok", "experts_per_token")
    if width is None or per_token is None:
        return None
    shared = (_first(config, "n_shared_experts") or 0) * width
    dense = getattr(config, "mlp_only_layers", None) or ()  # anywhere; a spec has them at the bottom, as many
    return Experts(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=width,
        shared_intermediate_size=_first(config, "shared_expert_intermediate_size") or shared,
        dense_layers_first=_first(config, "first_k_dense_replace") or len(dense),
    )


def config_of(spec: ModelSpec) -> PretrainedConfig:
    """A config of these shapes, of the architecture that has them: the same bytes and products, not the same text.

    Raises:
        UserError: no architecture that we know has such shapes.
    """
    common: dict[str, Any] = {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_model_len,
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if spec.latent_attention is not None:
        raise _no_architecture(spec, "latent attention")
    window = spec.sliding_window.tokens if spec.sliding_window else None
    kinds = [f"{'sliding' if spec.is_sliding(layer) else 'full'}_attention" for layer in range(spec.num_layers)]
    is_mixed = len(set(kinds)) > 1
    if not spec.gated_mlp:
        if spec.experts or is_mixed:
            raise _no_architecture(spec, "an MLP without gate, and experts or windows in some layers only")
        return Starcoder2Config(**common, sliding_window=window)
    if (experts := spec.experts) is not None:
        if experts.shared_intermediate_size or experts.dense_layers_first:
            raise _no_architecture(spec, "shared experts or dense layers beside experts")
        common |= {
            "intermediate_size": experts.intermediate_size,
            "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.experts_per_token,
        }
        if is_mixed:
            # GptOssConfig would stretch its default YaRN; the positions are all that a random model needs.
            plain = {"rope_type": "default", "rope_theta": 150000.0}
            return GptOssConfig(**common, sliding_window=window, layer_types=kinds, rope_parameters=plain)
        return MixtralConfig(**common, sliding_window=window)
    if is_mixed:
        return Qwen2Config(
            **common, use_sliding_window=True, sliding_window=window, layer_types=kinds, max_window_layers=0
        )
    if window is not None:
        return MistralConfig(**common, sliding_window=window)
    return LlamaConfig(**common)


def _no_architecture(spec: ModelSpec, what: str) -> UserError:
    return UserError(
        f"model {spec.name} has {what}, for which the engine has no model with random weights; "
        f"give the name of a model with weights, or choose another."
    )


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of weights and activations. Raises UserError if `name` is not one of three."""
    known: Iterable[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16)
    for dtype in known:
        if str(dtype) == f"torch.{name}":
            return dtype
    raise UserError(f"dtype is {name}; the engine computes in float32, float16 or bfloat16.")
