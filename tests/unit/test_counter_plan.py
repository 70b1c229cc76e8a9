"""Passes: few counters each, the clock in every one, the limits of the hardware kept."""

from __future__ import annotations

import pytest

from torch_ext.counter_plan import CYCLES, LIMITS, PRESETS, PlanError, architecture, plan


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", None, "gfx1151"])
@pytest.mark.parametrize("per_pass", [2, 3, 4])
def test_every_preset_fits_the_hardware(preset, arch, per_pass):
    planned = plan(preset=preset, arch=arch, per_pass=per_pass)
    assert all(p[0] == CYCLES and len(p) <= per_pass and len(set(p)) == len(p) for p in planned.passes)
    asked = [c for p in planned.passes for c in p[1:]]
    assert len(asked) == len(set(asked)) and set(asked) <= set(PRESETS[preset])
    left_out = set(PRESETS[preset]) - set(asked)
    assert left_out == ({"SQ_INSTS_VALU_MFMA_MOPS_F8"} & set(PRESETS[preset]) if arch == "gfx90a" else set())
    assert bool(planned.notes) == bool(left_out)


def test_the_busy_cycles_of_matrix_cores_share_their_pass_with_the_clock_and_the_operations():
    assert plan(arch="gfx942").passes[0] == (CYCLES, "SQ_VALU_MFMA_BUSY_CYCLES", "SQ_INSTS_VALU_MFMA_MOPS_BF16")


def test_what_does_not_fit_into_a_block_goes_into_another_pass():
    assert plan(["FETCH_SIZE", "WRITE_SIZE"], per_pass=9).passes == ((CYCLES, "FETCH_SIZE"), (CYCLES, "WRITE_SIZE"))
    many = [f"TCC_EA0_{i}" for i in range(9)]
    assert [len(p) - 1 for p in plan(many, arch="gfx942", per_pass=20).passes] == [LIMITS["TCC"]] * 2 + [1]
    assert plan(["GRBM_COUNT", "GRBM_SPI_BUSY"], per_pass=9).passes == (
        (CYCLES, "GRBM_COUNT"), (CYCLES, "GRBM_SPI_BUSY"))


def test_the_clock_alone_and_asked_for_twice():
    assert plan([CYCLES, CYCLES]).passes == ((CYCLES,),)
    assert plan([CYCLES, "SQ_WAVES", "SQ_WAVES"]).passes == ((CYCLES, "SQ_WAVES"),)


@pytest.mark.parametrize(("arguments", "says"), [
    ({"preset": "all"}, "no preset 'all'; there are breakdown"),
    ({"per_pass": 1}, "at least 2"),
    ({"counters": ["SQ_INSTS_VALU_MFMA_MOPS_F6F4"], "arch": "gfx942"}, "none of these counters exists on gfx942"),
])
def test_a_plan_that_cannot_be_says_why(arguments, says):
    with pytest.raises(PlanError, match=says):
        plan(**arguments)


@pytest.mark.parametrize(("versions", "arch"), [
    ([0, 0, 90402, 90402], "gfx942"), ([0, 90010], "gfx90a"), ([90500], "gfx950"), ([110501], "gfx1151"), ([0], None),
    ([], None),
])
def test_architecture_by_the_kernel_driver(tmp_path, versions, arch):
    for i, version in enumerate(versions):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\nvendor_id 1\n")
    assert architecture(tmp_path) == arch
