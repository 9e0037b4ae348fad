"""Budgets of the compiled kernels, in instructions, registers and bytes; and what counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernels.buckets import Compiled, needs_triton
from tests.support.kernels.costs import CASES, Cost, case_of, issued

SASS = """\
        .global         sum
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/             @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;
        /*0020*/                   LDG.E.U16 R5, desc[UR6][R2.64] ;
        /*0030*/              @P1 BRA `(.L_x_0) ;
        /*0040*/              @P0 BRA `(.L_x_1) ;
        /*0050*/                   MOV R7, R6 ;
        /*0060*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath) ;
.L_x_1:
        /*0070*/              @P0 BRA `(.L_x_2) ;
        /*0080*/                   SHFL.BFLY PT, R3, R3, 0x1, 0x1f ;
.L_x_2:
        /*0090*/                   STG.E.64 desc[UR6][R2.64], R4 ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   BRA `(.L_x_3);
        /*00c0*/                   NOP;
        .weak           $__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath
$__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath:
        /*00d0*/                   FADD.FTZ R0, R3, R0 ;
"""


def test_loops_count_every_iteration_and_skipped_branches_none():
    assert issued(SASS, rounds=8) == [
        ("MOV", 1), ("LDG.E.128", 8), ("LDG.E.U16", 8), ("BRA", 8),
        ("BRA", 1), ("BRA", 1), ("SHFL.BFLY", 1), ("STG.E.64", 1), ("EXIT", 1),
    ]  # fmt: skip


def test_costs_are_those_of_an_element():
    """32 threads do 64 elements: each instruction counts half."""
    found = Cost.of(Compiled("", SASS, registers=9, stack_bytes=4, local_bytes=8), elements=64, threads=32, rounds=8)
    assert (found.instructions, found.shared) == (15.0, 0.5)
    assert (found.loaded_bytes, found.stored_bytes, found.narrow_bytes) == (8 * 18 / 2, 4.0, 8 + 4.0)
    assert (found.registers, found.spilled_bytes) == (9, 12)


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", CASES)
def test_kernel_keeps_its_budget(name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Compiles for a GPU that is not there, which takes two seconds."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = case_of(name)
    found = case.measure(capability)
    assert found.instructions <= case.instructions
    assert found.registers <= case.registers
    assert found.spilled_bytes == 0
    assert found.narrow_bytes <= case.narrow_bytes
    assert found.shared <= case.shared
    needed = sum(case.needed_bytes())
    asked = found.loaded_bytes + found.stored_bytes
    assert asked >= needed - 1e-9, "something was not counted"
    assert asked - found.narrow_bytes <= needed, "what moves in whole vectors is asked for once"
