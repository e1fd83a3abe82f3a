"""Configs of small models, one of each kind of attention; windows are shorter than the prompts of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

torch.set_num_threads(1)  # with such small tensors, threads only wait for each other
WINDOW = 8
# Weights are larger than usual, so that the largest two logits are far apart, and the output projection is not the
# embedding, so that a model does not just repeat the token it was given.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, head_dim=24, query_pre_attn_scalar=24, sliding_window=WINDOW, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW, layer_types=LAYER_TYPES
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=LAYER_TYPES,
        rope_parameters=PLAIN_ROPE,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_layer=3,
        n_embd=64,
        n_head=4,
        vocab_size=128,
        n_positions=128,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    ),
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


def plain_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model of Hugging Face's own, float32, with random weights and plain attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        factory: Any = AutoModelForCausalLM
        model = factory.from_config(CONFIGS[kind](), dtype=torch.float32, attn_implementation="eager")
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):  # left uninitialised or small by the library; here they are to matter
                torch.nn.init.normal_(parameter, mean=1.0)
    plain: PreTrainedModel = model.eval()
    return plain
