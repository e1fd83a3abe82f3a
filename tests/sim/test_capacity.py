"""`kvtwin capacity`: the printed figures, run in process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from sim.commands.capacity import main
from workloads.errors import UserError

# The invocation that conf/capacity.yaml documents: one imaginary GPU with all 435 GB, or eight with an eighth each.
SHAPE = [
    "model=llama-3.1-70b",
    "max_model_len=8192",
    "request.prompt_tokens=600",
    "request.output_tokens=250",
    "request.shared_prefix_tokens=2000",
    "request.conversations=200",
    "batch.requests=16",
    "batch.tokens=500",
]
ONE_GPU = [*SHAPE, "kv_cache_memory_bytes=435000000000"]
EIGHT_GPUS = [*SHAPE, "kv_cache_memory_bytes=54375000000", "tensor_parallel=8"]


def printed(capsys: pytest.CaptureFixture[str], argv: Sequence[str]) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def row(text: str, label: str) -> list[str]:
    """The cells of the table row that begins with `label`."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(label)]
    return re.split(r"\s{2,}", line.strip())


@pytest.mark.parametrize("argv", [ONE_GPU, EIGHT_GPUS], ids=["one", "eight"])
def test_worked_example_is_printed(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    text = printed(capsys, argv)
    # 8,192 * 327,680 B = 2.684 GB; 850 * 327,680 = 0.2785 GB; 53 * 16 = 848 < 850, so 54 blocks; 850 of 8,192 slots
    # used leave 89.6 %.
    assert "holds 2.68 GB for a request that uses 0.28 GB (54 blocks of 16): about 90 % of the reservation" in text
    # 435e9 / (16 * 327,680) = 82,969.7 blocks, 1,327,504 slots: / 8,192 = 162.05; 82,969 / 54 = 1,536.5.
    assert "Requests that fit: 162 contiguous against 1,536 paged." in text
    # 200 * 2,000 * 327,680 = 131.07 GB; 2,000 = 125 blocks of 16 exactly, held once: 0.655 GB.
    assert "2,000 tokens in 200 conversations: 131 GB if each holds its own, 0.66 GB if they share" in text
    # 16 * 8,192 * 327,680 = 42.949 GB; 16 * 500 * 327,680 = 2.621 GB.
    assert "16 requests of 500 tokens: 42.9 GB reserved at the limit, 2.6 GB used" in text


def test_policies_of_the_worked_example(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, ONE_GPU)
    # 1,327,504 slots. pow2 reserves 600 + 256 = 856: 1,550.8 fit, wasting 6 / 856 = 0.7 %; regions of a buddy are
    # 1,024: 1,296.4 fit. The oracle reserves 850: 1,561.8. Paged wastes 14 of 864 = 1.6 %.
    assert row(text, "contiguous, max")[1:] == ["8,192", "2.68 GB", "0.28 GB", "89.6 %", "162", "162"]
    assert row(text, "contiguous, pow2")[1:] == ["856", "0.28 GB", "0.28 GB", "0.7 %", "1,550", "1,296"]
    assert row(text, "contiguous, oracle")[1:] == ["850", "0.28 GB", "0.28 GB", "0.0 %", "1,561", "1,296"]
    assert row(text, "paged, block 16")[1:] == ["864", "0.28 GB", "0.28 GB", "1.6 %", "1,536", "-"]


def test_memory_table_shows_one_gpu_and_all(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, EIGHT_GPUS)
    # 327,680 / 8 a token; blocks of 16.
    assert row(text, "KV per token")[1:] == ["40,960 B", "327,680 B"]
    assert row(text, "KV per block of 16")[1:] == ["655,360 B", "5,242,880 B"]
    assert row(text, "pool, blocks")[1:] == ["82,969"]
    # 70,553,706,496 parameters of 2 B are 141.1 GB, an eighth is 17.6 GB.
    assert row(text, "weights")[1:] == ["17.6 GB", "141 GB"]
    assert "exceed the memory" not in text  # 17.6 + 54.4 GB are below 85.0


def test_pool_beyond_the_gpu_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert "exceed the memory of one GPU" in printed(capsys, ONE_GPU)


def test_count_from_a_log_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, ["model=llama-3.1-8b", "hardware=rtx-4090", "memory.num_blocks=2588"])
    assert row(text, "pool, blocks")[1:] == ["2,588"]
    assert row(text, "pool, tokens")[1:] == ["41,408"]  # 2,588 * 16, as the engine's log says


def test_windows_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["model=gpt-oss-20b", "memory.num_blocks=10000", "request.prompt_tokens=3800", "request.output_tokens=200"]
    text = printed(capsys, argv)
    # 4,000 tokens are 250 blocks; a window of 128 touches 9. 12 * (250 + 9) of 24 * 250 layer blocks: 10,000 blocks
    # hold 40 requests, or 10,000 * 24 / (12 * 259) = 77.2.
    assert row(text, "paged, block 16")[5] == "40"
    assert row(text, "paged, windows freed")[5] == "77"
    # Two groups of 12 layers without padding: the same.
    assert row(text, "paged, 2 layer groups")[5] == "77"


def test_groups_of_layers_cost_padding(capsys: pytest.CaptureFixture[str]) -> None:
    # Gemma-3-27B: 10 full layers, 52 sliding ones in 6 groups, blocks of 10 layers. A window touches 65 blocks.
    argv = ["model=gemma-3-27b", "memory.num_blocks=10000", "request.output_tokens=100"]
    text = printed(capsys, [*argv, "request.prompt_tokens=8400"])
    # 8,500 tokens are 532 blocks: 10,000 * 62 / (10 * (532 + 6 * 65)) = 67.2, without padding 10,000 * 62 / (10 * 532 +
    # 52 * 65) = 71.3, and 18 with all layers full.
    assert row(text, "paged, block 16")[5] == "18"
    assert row(text, "paged, windows freed")[5] == "71"
    assert row(text, "paged, 7 layer groups")[5] == "67"
    text = printed(capsys, [*argv, "request.prompt_tokens=860"])
    # 960 tokens are 60 blocks in each layer: no window helps, and 70 places are held for 62 layers. 10,000 / 60 = 166.7
    # against 10,000 * 62 / (70 * 60) = 147.6.
    assert row(text, "paged, block 16")[5] == "166"
    assert row(text, "paged, 7 layer groups")[5] == "147"


def test_short_requests_show_no_window(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["model=gpt-oss-20b", "request.prompt_tokens=50", "request.output_tokens=50"]
    assert "windows freed" not in printed(capsys, argv)


def test_prefix_shares_only_full_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*ONE_GPU, "memory.block_size=1024", "request.conversations=100"]
    # 2,000 = 1,024 + 976: one block shared, 976 tokens in each conversation: (1,024 + 97,600) * 327,680 = 32.3 GB.
    assert "65.5 GB if each holds its own, 32.3 GB if they share" in printed(capsys, argv)


def test_same_options_print_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, EIGHT_GPUS) == printed(capsys, EIGHT_GPUS)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["memory.block_size=0"], "memory.block_size is 0; expected a whole number of at least 1"),
        (["request.prompt_tokens=-3"], "request.prompt_tokens is -3; expected"),
        (["request.output_tokens=many"], "request.output_tokens is 'many'; expected"),
        (["request.prompt_tokens=8000", "max_model_len=8192", "request.output_tokens=193"], "is 8193, above the limit"),
        (["max_model_len=200000"], "max_model_len is 200000, but llama-3.1-8b has 131072 positions"),
        (["model=llama-3.1-405b"], "llama-3.1-405b does not fit on 1 x h100-80gb: 756.0 GiB of weights"),
        (["model=lama"], "there is no model named lama"),
        (["tensor_paralel=2"], "there is no option tensor_paralel; did you mean tensor_parallel"),
        (["tensor_parallel=two"], "tensor_parallel is 'two'"),
        (["model=huggingface"], "model.name is not set"),
        (["model=huggingface", "model.name=nowhere.json"], "nowhere.json: no such file"),
    ],
)
def test_mistake_is_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        main(argv)
    assert "\n" not in str(caught.value)


def test_heavy_libraries_stay_out() -> None:
    code = (
        "import sys; from sim.commands.capacity import main; main([]); "
        "sys.exit(' '.join({'torch', 'pandas', 'pyarrow', 'matplotlib', 'simpy'} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.stderr.strip() == ""
