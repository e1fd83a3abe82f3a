"""config.json files, as published, against the bundled models; and what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from sim.config import build
from sim.huggingface import model_from
from sim.kv_layout import ModelSpec
from workloads.errors import UserError

CONF = Path(__file__).parents[2] / "conf"

# The keys that matter of each published file, with the spellings and omissions of that file.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "vocab_size": 128256,
    },
    "opt-13b": {
        "model_type": "opt", "hidden_size": 5120, "ffn_dim": 20480, "max_position_embeddings": 2048,
        "num_attention_heads": 40, "num_hidden_layers": 40, "torch_dtype": "float16", "vocab_size": 50272,
        "word_embed_proj_dim": 5120,
    },
    "mistral-7b": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "head_dim": 128, "hidden_size": 2560, "intermediate_size": 9728,
        "max_position_embeddings": 40960, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "head_dim": 256, "hidden_size": 3584, "intermediate_size": 14336,
        "max_position_embeddings": 8192, "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
        "sliding_window": 4096, "torch_dtype": "bfloat16", "vocab_size": 256000,
    },
    "gemma-3-27b": {
        "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
        "text_config": {
            "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
            "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "sliding_window": 1024,
        },
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "quantization_config": {"quant_method": "fp8"}, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "quantization_config": {"quant_method": "mxfp4"}, "sliding_window": 128, "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
}  # fmt: skip


def written(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def shapes(spec: ModelSpec) -> tuple[object, ...]:
    """What two descriptions of one model share: not the name, the published count, or how its pattern is written."""
    sliding = [spec.is_sliding(layer) for layer in range(spec.num_layers)]
    window = spec.sliding_window.tokens if spec.sliding_window else None
    head_dim = None if spec.latent_attention else spec.head_dim  # a latent's heads have three sizes
    bare = replace(spec, name="", num_parameters=None, sliding_window=None, head_dim=1, weight_dtype=None)
    return bare, sliding, window, head_dim, spec.layer_dtype


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_bundled_model(tmp_path: Path, name: str) -> None:
    bundled = build(OmegaConf.load(CONF / "model" / f"{name}.yaml"), "model")  # type: ignore[arg-type]
    assert shapes(model_from(str(written(tmp_path, PUBLISHED[name])))) == shapes(bundled)


def test_folder_names_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "My-Llama"
    folder.mkdir()
    written(folder, PUBLISHED["llama-3.1-8b"])
    assert model_from(str(folder)).name == "my-llama"
    assert model_from(str(folder / "config.json")).name == "my-llama"


def test_switched_on_window_begins_after_the_first_layers(tmp_path: Path) -> None:
    # Qwen2 of 28 layers, max_window_layers 20: layers 0 to 19 are full, 8 slide.
    values = {**PUBLISHED["qwen2.5-7b"], "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    spec = model_from(str(written(tmp_path, values)))
    assert [layer for layer in range(28) if spec.is_sliding(layer)] == list(range(20, 28))


def test_four_bit_weights_leave_the_cache_alone(tmp_path: Path) -> None:
    values = {**PUBLISHED["llama-3.1-8b"], "quantization_config": {"quant_method": "awq", "bits": 4}}
    spec = model_from(str(written(tmp_path, values)))
    assert (spec.layer_dtype, spec.dtype) == ("int4", "bfloat16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is mamba; supported are "),
        ({"model_type": None}, "model_type is None; supported are "),
        ({"hidden_size": None}, "no key hidden_size, which a llama model needs"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'; expected a whole number of at least 1"),
        ({"vocab_size": 0}, "vocab_size is 0; expected"),
        ({"num_key_value_heads": 5}, "32 heads cannot share 5 KV heads"),
        ({"quantization_config": {"quant_method": "bitnet"}}, "quant_method is bitnet; supported are"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quant_method is gptq with 3 bits"),
        ({"torch_dtype": "int3"}, "no dtype int3"),
        ({"word_embed_proj_dim": 512}, "word_embed_proj_dim differs from hidden_size"),
    ],
)
def test_unsupported_config_is_refused_by_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = written(tmp_path, {**PUBLISHED["llama-3.1-8b"], **changes})
    with pytest.raises(UserError, match=message) as caught:
        model_from(str(path))
    assert "\n" not in str(caught.value)


def test_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="not readable as JSON"):
        model_from(str(path))
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match="expected a JSON object"):
        model_from(str(path))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(UserError, match="no such file"):
            model_from(str(name))


def test_hub_id_without_the_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="somebody/model is no local path, and reading it from the hub needs"):
        model_from("somebody/model")


class FakeHub:
    """Stands for the library: answers with a file, or fails as it does offline."""

    def __init__(self, answer: Path | None) -> None:
        self.answer = answer

    def hf_hub_download(self, repository: str, name: str) -> str:
        if self.answer is None:
            raise OSError("Cannot reach the host.\nCheck your connection.")
        return str(self.answer)


def test_hub_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(None))
    with pytest.raises(
        UserError, match=r"somebody/model: config.json could not be fetched \(Cannot reach the host\)"
    ) as caught:
        model_from("somebody/model")
    assert "\n" not in str(caught.value)


def test_hub_file_is_named_after_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(written(tmp_path, PUBLISHED["llama-3.1-8b"])))
    assert model_from("somebody/Model-8B").name == "model-8b"
