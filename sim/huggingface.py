"""Reads a Hugging Face `config.json` into a `ModelSpec`.

Only what decides memory and time is read. An architecture is supported if its keys mean what we take them to mean;
any other is refused by name rather than guessed at. Parameters are counted from the shapes, for a config has no count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.kv_layout import Experts, LatentAttention, ModelSpec, SlidingWindow
from workloads.errors import UserError

LLAMA_LIKE = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma", "gemma2", "gemma3_text"}
SUPPORTED = LLAMA_LIKE | {"opt", "deepseek_v2", "deepseek_v3", "gpt_oss"}
TIED_BY_DEFAULT = {"opt", "gemma", "gemma2", "gemma3_text"}  # their config classes' default of tie_word_embeddings
# Layer i is full where (i + 1) is a multiple; the config classes' defaults for files that name no layer types.
FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
# What Gemma3TextConfig fills in, for the published files leave it out.
DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    }
}
QUANTISED = {"fp8": "fp8", "awq": "int4", "gptq": "int4"}
REMEDY = "Write the shapes down as in conf/model/ instead."


class ConfigFile:
    """A config.json whose missing and malformed keys are one-line errors.

    Args:
        values: the parsed file, or the part of it that describes the text model.
        name: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values = values
        self.name = name

    def whole(self, *keys: str) -> int:
        """The first of `keys` that is there.

        Raises:
            UserError: none is, or the value is no whole number of at least 1.
        """
        for key in keys:
            if (value := self.values.get(key)) is not None:
                if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
                    return value
                raise UserError(f"{self.name}: {key} is {value!r}; expected a whole number of at least 1.")
        raise UserError(f"{self.name}: no key {' or '.join(keys)}, which a {self.model_type} model needs. {REMEDY}")

    def whole_or(self, default: int, *keys: str) -> int:
        return self.whole(*keys) if any(self.values.get(key) is not None for key in keys) else default

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type"))


def model_from(name: str) -> ModelSpec:
    """The model that `name` leads to.

    Args:
        name: a config.json, a folder that holds one, or a hub id such as `meta-llama/Llama-3.1-8B`.

    Raises:
        UserError: nothing there, no JSON, an architecture we do not know, or a key that is missing or malformed.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    elif not path.exists() and path.suffix != ".json" and name.count("/") == 1:
        path = _from_hub(name)
        return _spec(_read(path), name, name.rpartition("/")[2].lower())
    if not path.is_file():
        raise UserError(f"{path}: no such file; model.name takes a config.json, a folder with one, or a hub id.")
    return _spec(_read(path), str(path), path.resolve().parent.name.lower())


def _from_hub(repository: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise UserError(
            f"{repository} is no local path, and reading it from the hub needs the huggingface_hub package; "
            f"install that, or give model.name the path of a config.json."
        ) from None
    try:
        return Path(hf_hub_download(repository, "config.json"))
    except Exception as error:  # offline, gated, misspelt: the library has a class for each, the remedy is one
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{repository}: config.json could not be fetched ({first_line.rstrip('.')}); "
            f"give model.name the path of a local config.json."
        ) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); expected a model's config.json.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object; give the config.json of a model.")
    return values


def _spec(values: dict[str, Any], file: str, name: str) -> ModelSpec:
    """The model's shapes; of a multimodal config, those of its text model."""
    text = values.get("text_config")
    values = {**values, **text} if isinstance(text, dict) else values
    kind = str(values.get("model_type"))
    if kind not in SUPPORTED:
        raise UserError(f"{file}: model_type is {kind}; supported are {', '.join(sorted(SUPPORTED))}. {REMEDY}")
    config = ConfigFile({**DEFAULTS.get(kind, {}), **values}, file)
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    latent = _latent_attention(config) if kind.startswith("deepseek") else None
    head_dim = config.whole_or(hidden // heads, "head_dim")
    if latent is not None:
        head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    if config.whole_or(hidden, "word_embed_proj_dim") != hidden:
        raise UserError(f"{file}: word_embed_proj_dim differs from hidden_size, which is not supported. {REMEDY}")
    weight_dtype = _weight_dtype(config)
    if weight_dtype == "mxfp4":  # gpt-oss: the experts alone are in 4 bits
        weight_dtype = None
    return ModelSpec(
        name=name,
        num_layers=config.whole("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.whole_or(heads, "num_key_value_heads"),
        head_dim=head_dim,
        intermediate_size=config.whole("ffn_dim" if kind == "opt" else "intermediate_size"),
        vocab_size=config.whole("vocab_size"),
        max_model_len=config.whole("max_position_embeddings"),
        gated_mlp=kind != "opt",
        tied_embeddings=bool(config.values.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)),
        dtype=_dtype(config),
        weight_dtype=weight_dtype,
        sliding_window=_sliding_window(config),
        latent_attention=latent,
        experts=_experts(config),
    )


def _dtype(config: ConfigFile) -> str:
    dtype = str(config.values.get("dtype") or config.values.get("torch_dtype") or "bfloat16")
    # Engines load 32-bit checkpoints in 16 bits (vLLM's dtype=auto).
    return "float16" if dtype == "float32" else dtype


def _weight_dtype(config: ConfigFile) -> str | None:
    quantisation = config.values.get("quantization_config")
    if not isinstance(quantisation, dict):
        return None
    method = quantisation.get("quant_method")
    if method in {"awq", "gptq"} and quantisation.get("bits", 4) != 4:
        method = f"{method} with {quantisation.get('bits')} bits"
    if method == "mxfp4":
        return "mxfp4"
    if method not in QUANTISED:
        known = ", ".join([*QUANTISED, "mxfp4"])
        raise UserError(f"{config.name}: quantization_config.quant_method is {method}; supported are {known}. {REMEDY}")
    return QUANTISED[method]


def _latent_attention(config: ConfigFile) -> LatentAttention:
    return LatentAttention(
        kv_lora_rank=config.whole("kv_lora_rank"),
        qk_rope_head_dim=config.whole("qk_rope_head_dim"),
        qk_nope_head_dim=config.whole("qk_nope_head_dim"),
        v_head_dim=config.whole("v_head_dim"),
        q_lora_rank=config.whole("q_lora_rank") if config.values.get("q_lora_rank") else None,
    )


def _experts(config: ConfigFile) -> Experts | None:
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    if not any(config.values.get(key) for key in keys):
        return None
    width = config.whole_or(config.whole("intermediate_size"), "moe_intermediate_size")
    for key in ("decoder_sparse_step", "moe_layer_freq"):
        if config.values.get(key, 1) != 1:
            raise UserError(f"{config.name}: {key} is {config.values[key]}; only 1 is supported. {REMEDY}")
    if config.values.get("mlp_only_layers"):
        raise UserError(f"{config.name}: mlp_only_layers is not empty, which is not supported. {REMEDY}")
    shared = config.values.get("n_shared_experts") or 0
    dense_first = config.values.get("first_k_dense_replace") or 0
    return Experts(
        num_experts=config.whole(*keys),
        experts_per_token=config.whole("num_experts_per_tok", "experts_per_token"),
        intermediate_size=width,
        shared_intermediate_size=shared * width,
        dense_layers_first=dense_first,
        weight_dtype="mxfp4" if _weight_dtype(config) == "mxfp4" else None,
    )


def _sliding_window(config: ConfigFile) -> SlidingWindow | None:
    """The window, if the file gives one and its architecture or its switch uses it."""
    values, kind = config.values, config.model_type
    if not values.get("sliding_window") or values.get("use_sliding_window") is False:
        return None
    tokens = config.whole("sliding_window")
    if types := values.get("layer_types"):
        pattern = tuple(str(layer).removesuffix("_attention") for layer in types)
        return SlidingWindow(tokens, pattern) if "sliding" in pattern else None
    if kind in {"qwen2", "qwen3", "qwen3_moe"}:  # the layers from max_window_layers on slide, and only if switched on
        if not values.get("use_sliding_window"):
            return None
        full = config.whole_or(28, "max_window_layers")
        sliding = max(0, config.whole("num_hidden_layers") - full)
        return SlidingWindow(tokens, ("full",) * full + ("sliding",) * sliding) if sliding else None
    every = config.whole_or(FULL_EVERY.get(kind, 0) or 1, "sliding_window_pattern")
    return SlidingWindow(tokens, ("sliding",) * (every - 1) + ("full",) if every > 1 else ("sliding",))
