"""Models on the engine: the tokens of Hugging Face's own `generate`, right shapes, and refusals in one line."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="the engine needs PyTorch")
transformers = pytest.importorskip("transformers", reason="the engine runs Hugging Face models")

from greedy import by_generate, by_pages, prompts  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tiny_models import CONFIGS, SIZES, WINDOW, plain_model  # noqa: E402

from gpu.batch import BatchBuilder, BlockTables, DecodeShape, SequenceWork  # noqa: E402
from gpu.model_config import config_of, spec_of  # noqa: E402
from gpu.models import PagedModel, build, load  # noqa: E402
from gpu.pool import KVPool  # noqa: E402
from sim.config import build as build_config  # noqa: E402
from sim.huggingface import model_from  # noqa: E402
from sim.kv_layout import Experts, ModelSpec, SlidingWindow  # noqa: E402
from workloads.errors import UserError  # noqa: E402

CONF = Path(__file__).parents[2] / "conf"
SPEC = ModelSpec("tiny", 2, 64, 4, 2, 16, 96, 128, 256, dtype="float32")


def one_line(refused: pytest.ExceptionInfo[UserError]) -> str:
    message = str(refused.value)
    assert "\n" not in message
    return message


@functools.cache
def generated(kind: str) -> tuple[list[NDArray[np.int64]], list[list[int]]]:
    """Prompts, and eight tokens each by `generate`."""
    plain = plain_model(kind)
    requests = prompts(SIZES["vocab_size"], [33, 5, 21])
    results = [by_generate(plain, prompt, 8) for prompt in requests]
    # Sums in another order move logits by some 1e-6 to 1e-5: nearer ones could change places.
    assert min(margin for _, margin in results) > 1e-3
    tokens = [tokens for tokens, _ in results]
    assert len(set().union(*tokens)) > 12  # of 24: a model that always says the same would prove little
    return requests, tokens


@pytest.mark.parametrize("block_size", [16, 7])
@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_are_those_of_generate(kind: str, block_size: int) -> None:
    requests, expected = generated(kind)
    assert by_pages(PagedModel(plain_model(kind), kind), requests, 8, block_size, max_chunk=14) == expected


def test_own_logits_are_those_of_the_plain_model_and_leave_the_engine_as_it_was() -> None:
    plain = plain_model("gemma2")
    (prompt,) = prompts(128, [20])
    with torch.inference_mode():
        expected = plain(torch.from_numpy(prompt)[None]).logits[0]
    model = PagedModel(plain, "gemma2")
    torch.testing.assert_close(model.own_logits(prompt), expected, rtol=0, atol=0)
    again, _ = by_generate(plain_model("gemma2"), prompt, 6)
    assert by_pages(model, [prompt], 6, 16, max_chunk=20) == [again]


def test_padding_of_a_decode_step_changes_no_sequence() -> None:
    model = build(SPEC)
    first, second = prompts(128, [9, 4])
    tables = BlockTables(4, 8)
    builder = BatchBuilder(tables, 4, 64, "cpu")
    rows = [tables.take(), tables.take()]

    def logits(pad_to: DecodeShape | None) -> torch.Tensor:
        pool = KVPool(model.spec, 16, 4)
        pool.blocks.fill_(torch.nan)
        blocks = [[3, 1, 2], [9, 5]]
        model.forward(
            builder.build([SequenceWork(rows[0], first, 9, blocks[0]), SequenceWork(rows[1], second, 4, blocks[1])]),
            pool,
        )
        works = [SequenceWork(rows[1], second[:1], 5, blocks[1]), SequenceWork(rows[0], first[:1], 10, blocks[0])]
        result = model.forward(builder.build(works, pad_to), pool)
        never_written = pool.blocks[:, :, [0, 4, *range(6, 9), *range(10, 16)]]
        assert never_written.isnan().all()
        return result

    padded = logits(DecodeShape(4, 8))
    assert padded.shape == (4, 128)
    # Rows of a matrix product may be summed in another order when there are more of them: some units in the last place.
    torch.testing.assert_close(padded[:2], logits(None), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - {"gpt2"}))
def test_spec_of_a_loaded_model_is_the_one_the_simulator_reads_from_its_config(kind: str, tmp_path: Path) -> None:
    model = plain_model(kind)
    model.config.save_pretrained(tmp_path)
    read = model_from(str(tmp_path))
    # The simulator reads no parameter count, and takes 32-bit checkpoints as 16-bit ones.
    loaded = replace(spec_of(model, read.name), num_parameters=None, dtype=read.dtype)
    patterns = [[spec.is_sliding(layer) for layer in range(spec.num_layers)] for spec in (loaded, read)]
    assert patterns[0] == patterns[1]
    assert replace(loaded, sliding_window=None) == replace(read, sliding_window=None)


def test_spec_counts_every_parameter_once() -> None:
    # Embedding and output 128 x 64 each; positions 128 x 64; a layer: 64 x 192 + 192, 64 x 64 + 64, 64 x 256 + 256,
    # 256 x 64 + 64, two norms of 2 x 64: 12,480 + 4,160 + 16,640 + 16,448 + 256 = 49,984; the last norm 128.
    model = plain_model("gpt2")
    spec = spec_of(model, "gpt2")
    assert spec.num_parameters == 3 * 128 * 64 + 3 * 49_984 + 128
    assert not spec.tied_embeddings
    assert not spec.gated_mlp
    assert (spec.intermediate_size, spec.head_dim, spec.num_kv_heads) == (256, 16, 4)
    # Float32; buffers, which only older versions of the model have, count as well.
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert PagedModel(model, "gpt2").weight_bytes == 4 * spec.num_parameters + buffers


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, head_dim=24, tied_embeddings=True),
        replace(SPEC, num_kv_heads=1, gated_mlp=False),
        replace(SPEC, sliding_window=SlidingWindow(WINDOW)),
        replace(SPEC, sliding_window=SlidingWindow(WINDOW, ("sliding", "full"))),
        replace(SPEC, experts=Experts(4, 2, 96)),
        replace(SPEC, experts=Experts(4, 2, 96), sliding_window=SlidingWindow(WINDOW, ("sliding", "full"))),
    ],
    ids=["llama", "heads", "plain_mlp", "window", "mixed", "experts", "mixed_experts"],
)
def test_model_built_from_a_spec_has_that_spec(spec: ModelSpec) -> None:
    built = build(spec).spec
    assert built.num_parameters is not None
    # Beyond the matrices there are norms, biases, sinks: each a vector. At these sizes they are up to a tenth.
    assert spec.matrix_parameters() <= built.num_parameters < 1.1 * spec.matrix_parameters()
    same = replace(built, num_parameters=None, sliding_window=spec.sliding_window)
    assert same == spec
    assert [built.is_sliding(i) for i in range(2)] == [spec.is_sliding(i) for i in range(2)]


@pytest.mark.parametrize("path", sorted((CONF / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_bundled_model_has_a_config_that_the_engine_runs_or_a_reason(path: Path) -> None:
    if path.stem == "huggingface":
        pytest.skip("names no model")
    spec = build_config(OmegaConf.load(path), "model")
    if spec.latent_attention:
        with pytest.raises(UserError, match="latent attention"):
            config_of(spec)
        return
    config = config_of(spec)
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 32, "vocab_size": 64}
    if getattr(config, "layer_types", None):
        small["layer_types"] = config.layer_types[:2]
    if hasattr(config, "num_local_experts"):
        small["num_local_experts"] = config.num_experts_per_tok
    for key, value in small.items():
        setattr(config, key, value)
    built = build(config, dtype="float32").spec
    for name in ("num_heads", "num_kv_heads", "head_dim", "gated_mlp", "tied_embeddings", "max_model_len"):
        assert getattr(built, name) == getattr(spec, name)


def test_random_weights_depend_on_the_seed_alone() -> None:
    (prompt,) = prompts(128, [10])
    torch.manual_seed(5)
    first = build(SPEC, seed=1).own_logits(prompt)
    state = torch.get_rng_state()
    torch.testing.assert_close(build(SPEC, seed=1).own_logits(prompt), first, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.allclose(build(SPEC, seed=2).own_logits(prompt), first)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_models_pass_the_check(dtype: str) -> None:
    model = build(SPEC, dtype=dtype)
    assert model.spec.dtype == dtype
    assert model.dtype == getattr(torch, dtype)


def test_saved_model_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    plain = plain_model("qwen3")
    plain.save_pretrained(tmp_path)
    (prompt,) = prompts(128, [18])
    expected, _ = by_generate(plain, prompt, 8)
    model = load(str(tmp_path))
    assert model.dtype == torch.float32
    assert by_pages(model, [prompt], 8, 16, max_chunk=10) == [expected]


REFUSED = {
    "falcon": (lambda: transformers.FalconConfig(), "attention interface"),
    "bloom": (lambda: transformers.BloomConfig(), "attention interface"),
    "mamba": (lambda: transformers.MambaConfig(), "state other than keys and values"),
    "jamba": (lambda: transformers.JambaConfig(), "state other than keys and values"),
    "deepseek": (lambda: transformers.DeepseekV3Config(), "latent"),
    "lfm2": (lambda: transformers.Lfm2Config(full_attn_idxs=[1], num_hidden_layers=2), "conv"),
    "llama4": (lambda: transformers.Llama4TextConfig(), "chunked_attention"),
    "gemma3n": (lambda: transformers.Gemma3nTextConfig(), "of others"),
    "t5": (lambda: transformers.T5Config(), "encoder"),
    "clip": (lambda: transformers.CLIPTextConfig(), "no causal language model"),
    "dynamic": (
        lambda: transformers.LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "dynamic rotary embedding",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_engine_cannot_run_is_refused_before_it_is_built(kind: str) -> None:
    # The configs are of full size: building one would take minutes.
    make, reason = REFUSED[kind]
    config = make()
    with pytest.raises(UserError, match=reason) as refused:
        build(config, name="the-model")
    message = one_line(refused)
    assert "the-model" in message
    assert config.model_type in message


def test_bidirectional_model_is_refused_by_its_attention() -> None:
    sizes = SIZES | {"head_dim": 16, "sliding_window": WINDOW}
    config = transformers.Gemma3TextConfig(**sizes, use_bidirectional_attention=True)
    with pytest.raises(UserError, match="does not attend causally") as refused:
        build(config, name="the-model", dtype="float32")
    assert "the-model" in one_line(refused)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (replace(SPEC, experts=Experts(4, 2, 96, shared_intermediate_size=96)), "shared experts"),
        (replace(SPEC, experts=Experts(4, 2, 96, dense_layers_first=1)), "dense layers"),
        (replace(SPEC, gated_mlp=False, experts=Experts(4, 2, 96)), "MLP without gate"),
    ],
)
def test_spec_without_an_architecture_is_refused(spec: ModelSpec, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        build(spec)
    one_line(refused)


def test_dtype_that_the_engine_does_not_compute_in_is_refused() -> None:
    with pytest.raises(UserError, match=r"dtype is fp8.*float32, float16 or bfloat16"):
        build(SPEC, dtype="fp8")


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in (str(tmp_path / "none"), "./none", str(tmp_path / "none.gguf"), "a/b/c"):
        with pytest.raises(UserError, match="no such file or folder"):
            load(missing)
    with pytest.raises(UserError, match=r"no config\.json"):
        load(str(tmp_path))
    (tmp_path / "weights.bin").touch()
    with pytest.raises(UserError, match="not a GGUF file"):
        load(str(tmp_path / "weights.bin"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and then nothing")
    with pytest.raises(UserError, match=r"broken\.gguf: could not be loaded") as refused:
        load(str(tmp_path / "broken.gguf"))
    one_line(refused)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "never heard of"}))
    with pytest.raises(UserError, match="could not be loaded") as refused:
        load(str(tmp_path))
    one_line(refused)
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="could not be loaded") as refused:  # a config, but no weights
        load(str(tmp_path))
    one_line(refused)


def test_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="nobody/nothing: could not be loaded") as refused:
        load("nobody/nothing")
    one_line(refused)
