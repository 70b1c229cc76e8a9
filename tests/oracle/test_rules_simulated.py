"""Each planted fault is found by its rule, with its size, and by no other; a healthy node has no diagnosis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tb_chopper.backend.run import Run
from tests.oracle import planted
from tests.oracle.planted import FAULTS, HEALTHY, Found


@pytest.fixture(scope="module")
def cleans(tmp_path_factory) -> dict[int | None, Run]:
    """The healthy node, by the number of steps."""
    return {steps: planted.opened(replace(HEALTHY, steps=steps), tmp_path_factory.mktemp("clean"))
            for steps in {f.options.steps for f in FAULTS.values()} | {None}}


@pytest.fixture(scope="module", params=FAULTS)
def case(request, tmp_path_factory, cleans) -> tuple[str, Found]:
    fault = FAULTS[request.param]
    return request.param, planted.find(fault, tmp_path_factory.mktemp("run"), cleans[fault.options.steps])


def test_a_healthy_node_has_no_diagnosis(cleans):
    for run in cleans.values():
        assert [d.message for d in run.diagnosis] == []


def test_the_rule_finds_its_fault_and_no_other_speaks(case):
    name, found = case
    assert [d.code for d in found.run.diagnosis] == [FAULTS[name].rule]


def test_the_size_is_the_planted_one(case):
    name, found = case
    fault = FAULTS[name]
    assert fault.size(found.diagnosis) == pytest.approx(fault.planted, rel=0.05)
    if fault.gpus is not None:
        assert found.diagnosis.gpus == fault.gpus
    if fault.steps is not None:
        assert found.diagnosis.steps == fault.steps


def test_the_gain_is_what_the_fault_costs(case):
    """Against the same node without it. Memory costs no time; of a storm the rule claims the waits for launches; of
    the 7 steps that follow another one, 3 are late in every second."""
    name, found = case
    within, gain = FAULTS[name].within, found.diagnosis.gain_ms
    if within is not None:
        assert gain == pytest.approx(found.cost_ms, rel=within)
    elif name == "storm":
        waits = planted.launch_waits_ms(Path(found.run.files.path))
        assert gain == pytest.approx(waits, rel=0.05)
        assert gain < found.cost_ms
    elif name == "late every second":
        assert gain == pytest.approx(20 * 3 / 7, rel=0.05)
    else:
        assert gain is None
        assert found.cost_ms == pytest.approx(0, abs=0.05)


def test_islands_against_the_groups_inside_one(tmp_path):
    """Tensor-parallel groups inside an island tell what its links reach."""
    options = replace(HEALTHY, ranks=8, tensor=4, layers=3, steps=5)
    clean, run = (planted.opened(o, tmp_path / n) for n, o in (("a", options), ("b", replace(options, islands=0.2))))
    d, = [d for d in planted.said(run) if d.code == "islands"]
    assert planted.evidence("of the bandwidth inside")(d) == pytest.approx(0.2, rel=0.05)
    assert planted.evidence("bandwidth inside an island, GB/s")(d) == pytest.approx(planted.LINK_GBS, rel=0.05)
    assert d.gain_ms == pytest.approx(planted.step_ms(run) - planted.step_ms(clean), rel=0.05)
