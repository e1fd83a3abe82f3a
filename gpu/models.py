"""Any Hugging Face causal language model on the KV pool: loaded with its weights, or built with random ones.

A model keeps its own code; only its attention is replaced (`attention.py`). What the engine cannot run is refused by
name (`model_config.py`), and what it gets wrong by a comparison when the model is loaded (`self_check.py`).
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from gpu import self_check
from gpu.attention import IMPLEMENTATION, AttentionBackend, LayerObserver, Step, default_backend, running
from gpu.batch import Batch
from gpu.model_config import config_of, refuse_unsupported, spec_of, torch_dtype
from gpu.pool import KVPool
from sim.kv_layout import ModelSpec
from workloads.errors import UserError


class PagedModel:
    """A causal language model whose attention reads and writes a KV pool.

    Args:
        model: in evaluation mode, on its device, of a kind that `refuse_unsupported` lets pass.
        name: as in messages.
        backend: computes attention; None is Triton on a GPU and torch elsewhere.

    Attributes:
        spec: its shapes; a pool for it is `KVPool(model.spec, ...)`.
        device: where its weights are.
        dtype: of weights and activations.

    Raises:
        UserError: on the engine it does not say what it says by itself.
    """

    def __init__(self, model: PreTrainedModel, name: str, backend: AttentionBackend | None = None) -> None:
        self.spec: ModelSpec = spec_of(model, name)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.backend: AttentionBackend = backend or default_backend(self.device)
        self._model: Any = model
        self._selects_tokens = "logits_to_keep" in inspect.signature(model.forward).parameters
        model.set_attn_implementation(IMPLEMENTATION)
        self_check.check(self)

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights and buffers; what is tied counts once."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: KVPool, observer: LayerObserver | None = None) -> Tensor:
        """Computes a step: stores the KV of its tokens and predicts what follows each sequence.

        Args:
            batch: the step.
            pool: laid out for `spec`; what the sequences' contexts have in it must have been computed before.
            observer: told of each layer that attends.

        Returns:
            Logits of the token after each sequence's last one, [sequences, vocab_size], in the order in which the
            sequences were given to the batch's builder.
        """
        selection = {"logits_to_keep": batch.last_tokens} if self._selects_tokens else {}
        with running(Step(batch, pool, self.backend, observer)):
            output = self._model(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, **selection
            )
        logits: Tensor = output.logits[0]
        return logits if self._selects_tokens else logits[batch.last_tokens]

    @torch.inference_mode()
    def own_logits(self, token_ids: NDArray[np.int64]) -> Tensor:
        """What the model says by itself, with no pool and its own plain attention.

        Args:
            token_ids: [tokens], one sequence.

        Returns:
            Logits after each of the tokens, float32 [tokens, vocab_size].
        """
        self._model.set_attn_implementation("eager")
        try:
            ids = torch.from_numpy(token_ids).to(self.device)[None]
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(IMPLEMENTATION)
        return logits.float()


def load(
    name: str,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    backend: AttentionBackend | None = None,
    revision: str | None = None,
) -> PagedModel:
    """A model with its weights.

    Args:
        name: a folder as `save_pretrained` writes it, a GGUF file, or a hub id, which is looked for in the hub's cache
            and downloaded if it is not there.
        dtype: auto is the checkpoint's own; or float32, float16, bfloat16. A GGUF file is dequantised to it.
        device: where to.
        backend: see `PagedModel`.
        revision: branch, tag or commit on the hub.

    Raises:
        UserError: nothing there, no access, a kind that the engine cannot run, or no memory.
    """
    source, options = _source(name)
    if revision is not None:
        options["revision"] = revision
    options["trust_remote_code"] = False
    weights_dtype = "auto" if dtype == "auto" else torch_dtype(dtype)
    config = _fetched(name, AutoConfig, source, options)
    refuse_unsupported(config, name)
    model = _fetched(name, AutoModelForCausalLM, source, options | {"dtype": weights_dtype})
    return PagedModel(_placed(model, name, torch.device(device)), name, backend)


def build(
    shape: ModelSpec | PretrainedConfig,
    name: str | None = None,
    dtype: str | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    backend: AttentionBackend | None = None,
) -> PagedModel:
    """A model with random weights: right in its bytes and its work, and always the same for a seed and device.

    Args:
        shape: what to build; weights that a `ModelSpec` has in fewer bits are built in `dtype` all the same.
        name: as in messages; None is the shape's own.
        dtype: None is the shape's own.
        device: where its weights are made.
        seed: of the weights.
        backend: see `PagedModel`.

    Raises:
        UserError: a kind that the engine cannot run, or no memory.
    """
    config = config_of(shape) if isinstance(shape, ModelSpec) else shape
    label = name or (shape.name if isinstance(shape, ModelSpec) else shape.model_type)
    refuse_unsupported(config, label)
    if dtype is None:
        dtype = str(shape.dtype or "float32").removeprefix("torch.")
    device = torch.device(device)
    factory: Any = AutoModelForCausalLM  # untyped in transformers
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            with device:
                model = factory.from_config(config, dtype=torch_dtype(dtype))
        except torch.OutOfMemoryError:
            raise _no_room(label, device) from None
    return PagedModel(model.eval(), label, backend)


def _source(name: str) -> tuple[str, dict[str, Any]]:
    """What transformers' `from_pretrained` takes for `name`: a folder or hub id, and options."""
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{name}: not a GGUF file; give a .gguf file, a folder with a model, or a hub id.")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{name}: no config.json in this folder; give the folder of a model.")
        return str(path), {"local_files_only": True}
    if path.suffix == ".gguf" or path.is_absolute() or name.count("/") > 1 or name.startswith((".", "~")):
        raise UserError(f"{name}: no such file or folder; give a .gguf file, a folder with a model, or a hub id.")
    return name, {}


def _fetched(name: str, factory: Any, source: str, options: dict[str, Any]) -> Any:
    """`factory.from_pretrained`, with its many kinds of failure as one line."""
    try:
        return factory.from_pretrained(source, **options)
    except ImportError as error:
        remedy = "install the missing package (GGUF files need gguf and accelerate)"
        raise UserError(f"{name}: could not be loaded ({_first_line(error)}); {remedy}.") from None
    except Exception as error:  # offline, gated, misspelt, damaged: the library has a class for each
        remedy = "check the name, the access rights and the network, or give a local folder"
        raise UserError(f"{name}: could not be loaded ({_first_line(error)}); {remedy}.") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".: ")


def _placed(model: Any, name: str, device: torch.device) -> PreTrainedModel:
    """The model on its device, in evaluation mode."""
    try:
        placed: PreTrainedModel = model.to(device).eval()
    except torch.OutOfMemoryError:
        raise _no_room(name, device) from None
    return placed


def _no_room(name: str, device: torch.device) -> UserError:
    free, total = torch.cuda.mem_get_info(device)
    return UserError(
        f"model {name}: its weights do not fit on {device}, where {free / 2**30:,.1f} of {total / 2**30:,.1f} GiB are "
        f"left; choose a smaller model or dtype."
    )
