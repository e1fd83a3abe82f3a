"""The check at load: attention that is wrong in one respect is found out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

torch = pytest.importorskip("torch", reason="the engine needs PyTorch")
transformers = pytest.importorskip("transformers", reason="the engine runs Hugging Face models")

from tiny_models import SIZES, WINDOW, plain_model  # noqa: E402
from torch import Tensor  # noqa: E402

from gpu.attention import ScoreRule, SdpaAttention  # noqa: E402
from gpu.batch import Batch  # noqa: E402
from gpu.models import PagedModel, build  # noqa: E402
from gpu.pool import LayerKV  # noqa: E402
from workloads.errors import UserError  # noqa: E402


@dataclass
class OtherRule(SdpaAttention):
    """Weighs by another rule than the model asks for; what is None stays."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: LayerKV, batch: Batch, rule: ScoreRule
    ) -> Tensor:
        changes = {name: value for name, value in vars(self).items() if value is not None}
        return super().attend(query, key, value, layer, batch, rule._replace(**changes))


class Lagging(SdpaAttention):
    """Overwrites the first slot of the block it writes: a token lost in every step."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: LayerKV, batch: Batch, rule: ScoreRule
    ) -> Tensor:
        block_size = layer.keys.shape[2]
        wrong = replace(batch, slots=batch.slots // block_size * block_size)
        layer.keys.nan_to_num_()
        layer.values.nan_to_num_()
        return super().attend(query, key, value, layer, wrong, rule)


class Unwritten(SdpaAttention):
    """Reads beyond the context, where nothing was written."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: LayerKV, batch: Batch, rule: ScoreRule
    ) -> Tensor:
        longer = replace(batch, host_context_lens=-(-batch.host_context_lens // 16) * 16)
        return super().attend(query, key, value, layer, longer, rule)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("llama", OtherRule(scale=0.2)),  # 0.25 is right
        ("mistral", OtherRule(window=0)),
        ("mistral", OtherRule(window=WINDOW - 1)),
        ("mistral", OtherRule(window=WINDOW + 1)),
        ("gemma2", OtherRule(softcap=0.0)),
        ("gpt_oss", OtherRule(sinks=torch.full((4,), -30.0))),  # as good as none
        ("llama", Lagging()),
        ("llama", Unwritten()),
    ],
    ids=["scale", "no window", "window - 1", "window + 1", "no softcap", "no sinks", "slots", "unwritten slots"],
)
def test_wrong_attention_is_found_out(kind: str, backend: SdpaAttention) -> None:
    with pytest.raises(UserError, match=rf"model {kind}: .* logits differ from its own") as refused:
        PagedModel(plain_model(kind), kind, backend)
    assert "\n" not in str(refused.value)


def test_wrong_attention_of_a_sixteen_bit_model_is_found_out() -> None:
    config = transformers.LlamaConfig(**SIZES)
    build(config, dtype="bfloat16")
    with pytest.raises(UserError, match=r"logits differ.*in bfloat16"):
        build(config, dtype="bfloat16", backend=Lagging())


def test_layer_that_does_not_attend_is_found_out() -> None:
    model = plain_model("llama")

    class Stateless(torch.nn.Module):
        def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
            return hidden_states, None

    model.model.layers[1].self_attn = Stateless()
    with pytest.raises(UserError, match="model changed: layers 1 never asked for attention"):
        PagedModel(model, "changed")


def test_window_that_is_not_the_configs_is_found_out() -> None:
    model = plain_model("gpt_oss")
    model.model.layers[1].self_attn.sliding_window = 50  # longer than the check's prompts, so the logits are right
    with pytest.raises(UserError, match="model changed: layer 1 attends to 50 tokens where its config says all"):
        PagedModel(model, "changed")
