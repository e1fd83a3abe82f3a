"""What the kernels need on a GPU that is not there: registers, spills, shared memory and instructions, by compiling.

Triton compiles for a target without a device or a driver. The calls compiled here are those the launchers make, built
from tensors without storage (torch's meta device) with the launch configurations that the device would get; only the
rule by which Triton specialises arguments is repeated. `python -m gpu.kernels.resources` writes the table of
`docs/kernels.md` anew.

Triton must not be interpreting in this process.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpu.kernels.block_copy import copy_call
from gpu.kernels.cache_write import write_call
from gpu.kernels.call import KernelCall
from gpu.kernels.decode import decode_calls
from gpu.kernels.launch import Device
from gpu.kernels.prefill import prefill_call
from gpu.kernels.scoring import Scoring
from workloads.errors import UserError

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"
BEGIN, END = "<!-- resources: begin -->", "<!-- resources: end -->"


@dataclass(frozen=True, slots=True)
class Limits:
    """A device and what one program may have of it.

    Args:
        device: as the launch configurations know it.
        shared_bytes: largest shared memory of a program (CUDA C programming guide, technical specifications per compute
            capability, less the 1 KiB that CUDA keeps; AMD CDNA 3 ISA: 64 KiB of LDS).
    """

    device: Device
    shared_bytes: int


LIMITS = (
    Limits(Device("sm_80", 108), 166_912),  # A100
    Limits(Device("sm_89", 142), 101_376),  # L40S
    Limits(Device("sm_90", 132), 232_448),  # H100, H200
    Limits(Device("sm_100", 148), 232_448),  # B200
    Limits(Device("gfx942", 304), 65_536),  # MI300X
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came out.

    Args:
        registers: of a thread (vector registers, on AMD with the accumulators).
        stack_bytes: of a thread's own memory: what did not fit into its registers.
        shared_bytes: of a program.
        assembly: PTX, or AMD assembly.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    assembly: str

    @property
    def matrix_instruction(self) -> str:
        """The family of matrix instructions used: tcgen05, wgmma, mma, mfma, or - for none."""
        for family, sign in (
            ("tcgen05", "tcgen05.mma"),
            ("wgmma", "wgmma.mma"),
            ("mma", "mma.sync"),
            ("mfma", "v_mfma"),
        ):
            if sign in self.assembly:
                return family
        return "-"

    @property
    def wide_loads(self) -> int:
        """Instructions that load 16 bytes a thread, into registers or straight into shared memory."""
        return len(re.findall(r"cp\.async\.cg|ld\.global[.\w]*\.v4|(?:global|buffer)_load_dwordx4", self.assembly))

    @property
    def cell(self) -> str:
        """As it stands in the table of the document."""
        return f"{self.registers} / {self.stack_bytes} / {self.shared_bytes:,} {self.matrix_instruction}"


@dataclass(frozen=True, slots=True)
class Case:
    """A problem whose kernels are compiled: `calls(device)` are the launches that it makes there."""

    name: str
    calls: Callable[[Device], list[KernelCall]]


def compile_call(call: KernelCall, target: str) -> Compiled:
    """Compiles a call for an architecture, `sm_90` or `gfx942`."""
    kernel: Any = call.kernel
    signature = {}
    constants = dict(call.constants)
    attributes = {}
    for index, name in enumerate(kernel.arg_names):
        if name in call.constants:
            signature[name] = "constexpr"
            continue
        value = call.arguments[name]
        kind, divisible = _specialised(value)
        signature[name] = kind
        if kind == "constexpr":
            constants[name] = value
        elif divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    if target.startswith("gfx"):
        gpu = GPUTarget("hip", target, 64)
    else:
        gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=gpu, options=call.options)
    if gpu.backend == "hip":
        text = compiled.asm["amdgcn"]
        return Compiled(
            registers=_figure(r"\.vgpr_count:\s*(\d+)", text) + _figure(r"\.agpr_count:\s*(\d+)", text),
            stack_bytes=_figure(r"\.private_segment_fixed_size:\s*(\d+)", text),
            shared_bytes=compiled.metadata.shared,
            assembly=text,
        )
    usage = _cuobjdump(compiled.asm["cubin"])
    return Compiled(
        registers=_figure(r"REG:(\d+)", usage),
        stack_bytes=_figure(r"STACK:(\d+)", usage) + _figure(r"LOCAL:(\d+)", usage),
        shared_bytes=compiled.metadata.shared,
        assembly=compiled.asm["ptx"],
    )


def _specialised(value: Any) -> tuple[str, bool]:
    """Type of an argument, and whether the launcher would promise that it is divisible by 16.

    Pointers are taken to be aligned, as torch allocates them. An integer 1 and None become constants.
    """
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype], True
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr", False
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0
    return "fp32", False


_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def _figure(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in the compiler's output")
    return int(found[1])


def _cuobjdump(cubin: bytes) -> str:
    """Resource usage of a CUDA binary, as the tool that comes with Triton prints it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    return done.stdout


def _pool(num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one of 32 layers of a pool of 4,096 blocks."""
    pool = torch.empty((32, 2, 4096, num_kv_heads, block_size, head_dim), dtype=dtype, device="meta")
    return pool[0, 0], pool[0, 1]


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention of 64 sequences of up to 4,096 tokens, or of 8,192 new tokens of 8 sequences."""

    dtype: torch.dtype = torch.bfloat16
    pool_dtype: torch.dtype = torch.bfloat16
    num_kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    def scoring(self) -> Scoring:
        sinks = torch.empty(self.num_kv_heads * self.group, device="meta") if self.sinks else None
        return Scoring(self.head_dim**-0.5, self.window, self.softcap, sinks)

    def decode(self, device: Device) -> list[KernelCall]:
        return self._decode(device, _ids(64, 4096 // self.block_size + 1))

    def contiguous_decode(self, device: Device) -> list[KernelCall]:
        return self._decode(device, _ids(64))

    def _decode(self, device: Device, tables: torch.Tensor) -> list[KernelCall]:
        k_pool, v_pool = _pool(self.num_kv_heads, self.block_size, self.head_dim, self.pool_dtype)
        q = self._queries(64)
        return decode_calls(
            q, k_pool, v_pool, tables, _ids(64), self.scoring(), 4096, torch.empty_like(q), None, None, device
        )

    def prefill(self, device: Device) -> list[KernelCall]:
        k_pool, v_pool = _pool(self.num_kv_heads, self.block_size, self.head_dim, self.pool_dtype)
        q = self._queries(8192)
        tables = _ids(8, 4096 // self.block_size + 1)
        scoring = self.scoring()
        return [
            prefill_call(
                q, k_pool, v_pool, tables, _ids(9), _ids(8), scoring, 1024, torch.empty_like(q), None, None, device
            )
        ]

    def write(self, device: Device) -> list[KernelCall]:
        k_pool, v_pool = _pool(self.num_kv_heads, self.block_size, self.head_dim, self.pool_dtype)
        k = torch.empty((8192, self.num_kv_heads, self.head_dim), dtype=self.dtype, device="meta")
        slots = torch.empty(8192, dtype=torch.int64, device="meta")
        return [write_call(k, k, k_pool, v_pool, slots, 1.0, 1.0, device)]

    def copy(self, device: Device) -> list[KernelCall]:
        shape = (64, 4096, self.num_kv_heads, self.block_size, self.head_dim)
        pool = torch.empty(shape, dtype=self.pool_dtype, device="meta")
        pairs = torch.empty((16, 2), dtype=torch.int64, device="meta")
        return [copy_call(pool, pool, pairs[:, 0], pairs[:, 1])]

    def _queries(self, count: int) -> torch.Tensor:
        return torch.empty((count, self.num_kv_heads * self.group, self.head_dim), dtype=self.dtype, device="meta")


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


BASE = Problem()
SMALL_HEADS = Problem(head_dim=64, group=8, window=128, sinks=True)
LARGE_HEADS = Problem(head_dim=256, group=2, window=4096, softcap=50.0)
ODD_SIZES = Problem(head_dim=80, group=5, block_size=24)
FP8_POOL = Problem(pool_dtype=torch.float8_e4m3fn)
FULL_PRECISION = Problem(dtype=torch.float32, pool_dtype=torch.float32)

CASES = (
    Case("decode, 4 × 128", BASE.decode),
    Case("decode, 4 × 128, contiguous", BASE.contiguous_decode),
    Case("decode, 8 × 64, window, sinks", SMALL_HEADS.decode),
    Case("decode, 2 × 256, window, softcap", LARGE_HEADS.decode),
    Case("decode, 5 × 80, blocks of 24", ODD_SIZES.decode),
    Case("decode, 4 × 128, fp8 pool", FP8_POOL.decode),
    Case("decode, 4 × 128, float32", FULL_PRECISION.decode),
    Case("prefill, 4 × 128", BASE.prefill),
    Case("prefill, 8 × 64, window, sinks", SMALL_HEADS.prefill),
    Case("prefill, 2 × 256, window, softcap", LARGE_HEADS.prefill),
    Case("prefill, 4 × 128, fp8 pool", FP8_POOL.prefill),
    Case("prefill, 4 × 128, float32", FULL_PRECISION.prefill),
    Case("write", BASE.write),
    Case("write, fp8 pool", FP8_POOL.write),
    Case("copy", BASE.copy),
)


def compile_case(case: Case, device: Device) -> dict[str, Compiled]:
    """What comes out for each kernel that a case launches on a device, by name; nothing if the device lacks a type."""
    try:
        calls = case.calls(device)
    except UserError:
        return {}
    return {call.kernel.__name__: compile_call(call, device.target) for call in calls}


def table() -> str:
    """The table of all cases on all devices, in Markdown."""
    targets = [limits.device.target for limits in LIMITS]
    lines = ["| problem | kernel | " + " | ".join(targets) + " |", "| --- " * (2 + len(targets)) + "|"]
    for case in CASES:
        columns = [compile_case(case, limits.device) for limits in LIMITS]
        for kernel in dict.fromkeys(name for column in columns for name in column):
            cells = (column[kernel].cell if kernel in column else "not launched" for column in columns)
            lines.append(f"| {case.name} | `{kernel}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def committed_table() -> str:
    """The table as the document has it."""
    generated = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    return "\n".join(line for line in generated.splitlines() if line.startswith("|"))


def committed_version() -> str:
    """The Triton that the document's table was made with."""
    found = re.search(r"Triton ([\w.+]+),", DOCUMENT.read_text(encoding="utf-8").split(BEGIN)[1])
    return found[1] if found else "none"


def main() -> None:
    """Writes the table of the document anew."""
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    compiler = f"Triton {triton.__version__}, bfloat16 unless it says otherwise."
    DOCUMENT.write_text(f"{before}{BEGIN}\n{compiler}\n\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
