"""Every case of `gpu/kernels/resources.py`, compiled for GPUs that are not there, with the launches these would get."""

from __future__ import annotations

import pytest
import triton

from gpu.kernels.resources import (
    CASES,
    LIMITS,
    Case,
    Compiled,
    Limits,
    committed_table,
    committed_version,
    compile_case,
)

# All cases on the device that performance is aimed at, and the plain ones on all.
MAIN = [
    (case, limits)
    for limits in LIMITS
    for case in CASES
    if limits.device.target == "sm_90" or case.name in ("decode, 4 × 128", "prefill, 4 × 128", "write", "copy")
]
OTHER = [(case, limits) for limits in LIMITS for case in CASES if (case, limits) not in MAIN]


def pairs(chosen: list[tuple[Case, Limits]]) -> pytest.MarkDecorator:
    ids = [f"{limits.device.target} {case.name}" for case, limits in chosen]
    return pytest.mark.parametrize(("case", "limits"), chosen, ids=ids)


def matrix_instruction(case: Case, kernel: str, target: str) -> str:
    """The family that is meant: the widest that the device has for the tile; none in full precision on NVIDIA."""
    if kernel not in ("decode_kernel", "prefill_kernel"):
        return "-"
    if target.startswith("gfx"):
        return "mfma"
    if "float32" in case.name:
        return "-"
    # wgmma and tcgen05 take at least 64 rows, which the 16 of decode are not.
    widest = {"sm_90": "wgmma", "sm_100": "tcgen05"}
    return widest.get(target, "mma") if kernel == "prefill_kernel" else "mma"


@pairs(MAIN)
def test_main_kernels_fit_without_spilling_and_use_the_instructions_meant(case: Case, limits: Limits) -> None:
    check(case, limits)


@pairs(OTHER)
def test_other_kernels_fit_without_spilling_and_use_the_instructions_meant(case: Case, limits: Limits) -> None:
    check(case, limits)


def check(case: Case, limits: Limits) -> None:
    target = limits.device.target
    compiled = compile_case(case, limits.device)
    assert bool(compiled) != ("fp8" in case.name and target == "sm_80")
    for kernel, result in compiled.items():
        assert result.stack_bytes == 0, kernel
        assert result.shared_bytes <= limits.shared_bytes, kernel
        assert result.matrix_instruction == matrix_instruction(case, kernel, target), kernel
        if target.startswith("sm_"):
            assert result.wide_loads > 0, kernel
    check_streaming(case, limits, compiled)
    check_document(case, target, compiled)


def check_streaming(case: Case, limits: Limits, compiled: dict[str, Compiled]) -> None:
    """K and V go to shared memory 16 bytes a thread, with as many tiles in flight as the launch says."""
    if not compiled or not limits.device.target.startswith("sm_"):
        return
    call = case.calls(limits.device)[0]
    if "TILE" not in call.constants:
        return
    result = compiled[call.kernel.__name__]
    pool_bytes = call.arguments["k_pool"].element_size()
    tile = call.constants["TILE"] * call.constants["PADDED_DIM"] * pool_bytes
    assert result.shared_bytes >= (call.num_stages - 1) * 2 * tile
    assert "cp.async.cg.shared.global" in result.assembly
    if pool_bytes > 1:
        # Copies of fewer bytes would be those of the block table, which must not take the stages of K and V.
        assert "cp.async.ca" not in result.assembly


def check_document(case: Case, target: str, compiled: dict[str, Compiled]) -> None:
    """The committed table says the same, if it was made with this compiler."""
    if committed_version() != triton.__version__:
        return
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in committed_table().splitlines()]
    column = rows[0].index(target)
    for kernel, result in compiled.items():
        found = [row[column] for row in rows if row[:2] == [case.name, f"`{kernel}`"]]
        assert found == [result.cell]


def test_three_decodes_fit_on_an_sm_of_an_h100() -> None:
    # 65,536 registers and 228 KiB of shared memory, of which each program also takes 1 KiB for the system.
    (hopper,) = (limits for limits in LIMITS if limits.device.target == "sm_90")
    for case in CASES[:2]:
        call = case.calls(hopper.device)[0]
        result = compile_case(case, hopper.device)["decode_kernel"]
        assert 3 * result.registers * 32 * call.num_warps <= 65_536
        assert 3 * (result.shared_bytes + 1024) <= 228 * 1024


def test_contiguous_decode_has_the_buffers_of_paged_decode() -> None:
    paged, contiguous = CASES[:2]
    for limits in LIMITS:
        results = [compile_case(case, limits.device)["decode_kernel"] for case in (paged, contiguous)]
        assert results[0].shared_bytes == results[1].shared_bytes
