"""What the rules say of runs whose answer is planted, and that they are silent just below their thresholds (µs)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tb_chopper
from tb_chopper.backend import rules
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis
from tb_chopper.backend.run import Run
from tb_chopper.backend.views import trace_link
from tests.builders import TraceBuilder
from tests.unit import sampled_runs

STEP, STEPS = 1000, 6
LINK = 450e9
"""bytes per second and direction between H100s"""


def run_of(folder: Path, ranks: int, step: Callable[[TraceBuilder, int, float, int], None]) -> Run:
    """Traces in which `step(trace, rank, start, number)` adds each of the steps."""
    for rank in range(ranks):
        trace = TraceBuilder(rank=rank, world_size=ranks)
        trace.head["deviceProperties"][0]["numSms"] = 132  # as an H100 has them: its links are known
        for number in range(STEPS):
            trace.step(number, STEP * number, 995)
            step(trace, rank, STEP * number, number)
        trace.write(folder / f"rank{rank}.pt.trace.json")
    return tb_chopper.open_run(folder)


def compute(trace: TraceBuilder, start: float, dur: float, backward: bool = False) -> None:
    """A kernel that was launched in time."""
    if backward:
        trace.op("autograd::engine::evaluate_function: MmBackward0", start - 8, 6, seq=1, fwd_thread=1)
    else:
        trace.op("aten::mm", start - 8, 6, seq=1)
    trace.launch("gemm", start - 6, start, dur)


def reduce(trace: TraceBuilder, number: int, start: float, dur: float, nelems: int, **args: Any) -> None:
    trace.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", start - 8, 6)
    trace.collective("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start - 6, start, dur,
                     **({"Seq": number, "In msg nelems": nelems} | args))


def found(run: Run, name: str) -> list[Diagnosis]:
    """What one rule says by itself."""
    module = importlib.import_module(f"tb_chopper.backend.rules.{name}")
    said = [d for d in module.rule(run) if isinstance(d, Diagnosis)]
    for d in said:  # every one leads to a kernel of the run and to a tab
        assert trace_link.find(run.kernels, d.kernel)["gpu"] in (d.gpus or run.kernels["gpu"].unique())
        run.view(d.view, **d.selection)
    return said


def evidence(diagnosis: Diagnosis) -> dict[str, float | str]:
    return {e.label: e.value for e in diagnosis.evidence}


# ---- one by one ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("exposed", "speaks"), [(200, True), (148, False)])
def test_exposed_communication_is_without_waiting(tmp_path: Path, exposed: float, speaks: bool) -> None:
    """Rank 1 is 50 µs late: rank 0 waits so long, which is not transfer."""

    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        late = 50 * rank
        compute(trace, start + 10, 300 + late)
        reduce(trace, number, start + 310 + late, 50 - late + exposed, 10_000_000)
        compute(trace, start + 360 + exposed, 650 - exposed)

    said = found(run_of(tmp_path, 2, step), "exposed_communication")
    assert [d.code for d in said] == ["exposed_communication"] * speaks
    for d in said:
        assert d.gain_ms == pytest.approx(exposed / 1000)
        assert evidence(d)["all exposed"] == exposed + 25  # median of 50 and 0 of waiting


@pytest.mark.parametrize(("group", "word"), [
    ("mesh_tp", "fewer GPUs; asynchronous tensor"), ("mesh_dp_replicate", "no_sync"), ("mesh_dp_shard", "prefetch")])
def test_exposed_communication_has_the_remedy_of_the_group(tmp_path: Path, group: str, word: str) -> None:
    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        compute(trace, start + 10, 300)
        reduce(trace, number, start + 310, 300, 10_000_000, **{"Process Group Description": group})
        compute(trace, start + 610, 385)

    said = found(run_of(tmp_path, 2, step), "exposed_communication")
    assert [word in d.remedy for d in said] == [True]


@pytest.mark.parametrize(("busy", "speaks"), [(300, True), (699, True), (705, False)])
def test_low_utilization_names_what_the_host_did(tmp_path: Path, busy: float, speaks: bool) -> None:
    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        compute(trace, start + 10, busy)  # launched 6 µs before: the host came late for the rest of the gap

    said = found(run_of(tmp_path, 1, step), "low_utilization")
    assert len(said) == speaks
    for d in said:
        assert evidence(d)["busy"] == pytest.approx(busy / STEP)
        assert d.gain_ms == pytest.approx(1 - busy / STEP)
        assert d.cause == "the host cannot launch fast enough"
        assert (evidence(d)["most dispatch before"], evidence(d)["of that"]) == ("aten::mm", 1)


def test_low_utilization_says_nothing_of_a_profile_without_gpu(tmp_path: Path) -> None:
    trace = TraceBuilder()
    for number in range(STEPS):
        trace.step(number, STEP * number, 990)
        trace.op("aten::mm", STEP * number + 10, 100)
    trace.write(tmp_path / "rank0.pt.trace.json")
    assert tb_chopper.open_run(tmp_path).diagnosis == []


@pytest.mark.parametrize(("bandwidth", "nelems", "slow"), [
    (0.2 * LINK, 10_000_000, True),   # a fifth of the link
    (0.45 * LINK, 10_000_000, False),  # well enough
    (0.2 * LINK, 1_000, False),        # too small for the link: latency
])
def test_slow_link(tmp_path: Path, bandwidth: float, nelems: int, slow: bool) -> None:
    """Of two ranks the bus bandwidth of an all-reduce is the algorithm's: bytes / transfer."""
    transfer = max(nelems * 4 / bandwidth * 1e6, 30.0)

    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        compute(trace, start + 10, 400)
        reduce(trace, number, start + 410, transfer, nelems)
        compute(trace, start + 410 + transfer, 590 - transfer)

    said = found(run_of(tmp_path, 2, step), "slow_link")
    assert len(said) == slow
    for d in said:
        assert evidence(d)["of the link's peak"] == pytest.approx(bandwidth / LINK, rel=1e-3)
        assert evidence(d)["bus bandwidth, GB/s"] == pytest.approx(bandwidth / 1e9, rel=1e-3)
        saved = transfer * (1 - bandwidth / LINK / thresholds.LINK_REACHES)
        assert d.gain_ms == pytest.approx(saved / 1000, rel=1e-3)


@pytest.mark.parametrize(("name", "said"), [("all_reduce", 1), ("send_recv", 0), ("recv", 0)])
def test_a_pair_may_have_one_of_several_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: int
                                              ) -> None:
    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        compute(trace, start + 10, 400)
        reduce(trace, number, start + 410, 400, int(0.1 * LINK * 400e-6) // 4)

    run = run_of(tmp_path, 2, step)
    plain, every = run.collectives, run.collectives().assign(name=name)
    monkeypatch.setattr(run, "collectives", lambda **of: plain(**of) if "by" in of else every)
    assert len(found(run, "slow_link")) == said


@pytest.mark.parametrize(("many", "group", "speaks"), [
    (24, "default_pg", True), (16, "default_pg", False), (24, "mesh_tp", False)])
def test_small_messages(tmp_path: Path, many: int, group: str, speaks: bool) -> None:
    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        compute(trace, start + 10, 400)
        for i in range(many):
            reduce(trace, number * many + i, start + 420 + 10 * i, 9, 256, **{"Process Group Description": group})

    said = found(run_of(tmp_path, 2, step), "small_messages")
    assert len(said) == speaks
    for d in said:
        assert evidence(d)["small collectives a step"] == many and evidence(d)["typical size"] == 256 * 4
        assert d.gain_ms == pytest.approx(many * 9 / 1000)


@pytest.mark.parametrize(("tail", "late", "speaks"), [
    (120, 0, True),     # 12 % of the step between backward and optimizer
    (20, 0, False),     # 2 %
    (120, 150, False),  # what passes there is waiting for rank 1
])
def test_gradient_barrier(tmp_path: Path, tail: float, late: float, speaks: bool) -> None:
    said = found(run_of(tmp_path, 2, barrier(tail, late, launched=0)), "gradient_barrier")
    assert len(said) == speaks
    for d in said:
        assert d.gain_ms == pytest.approx(tail / 1000)


@pytest.mark.parametrize(("launched", "gain"), [(40, 80), (110, None)])
def test_gradient_barrier_counts_from_the_launch_of_the_optimizer(tmp_path: Path, launched: float, gain: float) -> None:
    """What passes before the optimizer is launched is its host's time, whatever the GPUs communicate meanwhile."""
    said = found(run_of(tmp_path, 2, barrier(120, 0, launched)), "gradient_barrier")
    assert [d.gain_ms for d in said] == ([] if gain is None else [pytest.approx(gain / 1000)])


def barrier(tail: float, late: float, launched: float) -> Callable[[TraceBuilder, int, float, int], None]:
    """Gradients are reduced for `tail` after backward; the optimizer is launched `launched` after backward's end."""

    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        later = late * rank
        compute(trace, start + 10, 200)
        compute(trace, start + 210, 200 + later, backward=True)
        reduce(trace, number, start + 410 + later, tail + late - later, 1_000_000)
        call = start + 410 + launched
        trace.annotation("Optimizer.step#AdamW.step", call - 1, 20)
        trace.op("aten::_fused_adamw_", call - 0.5, 10)
        trace.launch("fused_adamw", call, start + 410 + late + tail, 100)

    return step


@pytest.mark.parametrize(("late", "speaks"), [(100, True), (30, False)])
def test_late_host(tmp_path: Path, late: float, speaks: bool) -> None:
    """Rank 2 launches its first kernel late; the others wait for it in the collective."""

    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        mine = late * (rank == 2)
        compute(trace, start + 10, 400)
        compute(trace, start + 410 + mine, 400)
        reduce(trace, number, start + 810 + mine, 150 - mine + 20, 10_000, **{"Group size": 3})

    said = found(run_of(tmp_path, 3, step), "late_host")
    assert [d.gpus for d in said] == [(2,)] * speaks
    for d in said:
        assert d.gain_ms == pytest.approx(late / 1000)
        assert evidence(d)["GPU 2 idles longer"] == pytest.approx(late)
        # One pause: the first kernel ends at 410, the call that launches the late one begins 6 µs before it.
        assert evidence(d)["longest pause of GPU 2 in a step"] == pytest.approx(late - 6)
        assert f"nothing for {(late - 6) / 1000:.4g} ms at a time, before aten::mm" in d.cause


def test_hosts_that_are_late_together_are_named_together(tmp_path: Path) -> None:
    """Ranks 1 and 3 of five are late by 100 and 80 µs: one alone gains 20 or nothing, both gain 100."""

    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        mine = {1: 100, 3: 80}.get(rank, 0)
        compute(trace, start + 10, 400)
        compute(trace, start + 410 + mine, 400)
        reduce(trace, number, start + 810 + mine, 170 - mine, 10_000, **{"Group size": 5})

    [d] = found(run_of(tmp_path, 5, step), "late_host")
    assert d.gpus == (1, 3) and d.gain_ms == pytest.approx(0.100)
    assert d.message.startswith("GPU 1 is idle 0.1 ms, GPU 3 0.08 ms longer in a step than the median GPU")


def test_the_profiler_itself(tmp_path: Path) -> None:
    """CUPTI flushes its buffers for 40 µs of each step, and the GPU runs dry."""

    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        compute(trace, start + 10, 400)
        trace.span("overhead", "Buffer Flush", start + 410, 40, pid=-1, tid=0)
        compute(trace, start + 460, 550)

    run = run_of(tmp_path, 1, step)
    [said] = found(run, "profiler_overhead")
    assert said.gain_ms == pytest.approx(0.040) and evidence(said)["calls"] == "Buffer Flush"
    assert run.idle_causes().set_index("cause")["idle_us"]["profiler"] == STEPS * 40


def throttled(folder: Path, share: float, power_w: float, throttle: str = "none") -> Run:
    """One GPU, steps of 10 ms full of one kernel, at a share of its 2100 MHz."""
    sampled_runs.gpu_trace(folder, [(10 * i, 10 * i + 10) for i in range(STEPS)])
    sampled_runs.log(folder, 70, gpu={0: lambda t: {
        "clock_mhz": 2100 * share, "power_w": power_w, "power_limit_w": 750, "throttle": throttle}})
    return tb_chopper.open_run(folder)


@pytest.mark.parametrize(("power_w", "throttle", "cause"), [
    (748, "none", "the GPUs draw their power cap"),
    (600, "thermal:40", "the GPUs are hot"),
    (400, "none", "the clock stays below its peak though power is left"),
])
def test_the_clock(tmp_path: Path, power_w: float, throttle: str, cause: str) -> None:
    [said] = found(throttled(tmp_path, 0.8, power_w, throttle), "clock")
    assert said.cause == cause
    assert said.gain_ms == pytest.approx(10 * 0.2, rel=0.01)  # kernels fill their steps but for 10 µs
    assert evidence(said)["mean clock"] == pytest.approx(0.8 * 2100)


def test_a_clock_near_its_peak_is_no_finding(tmp_path: Path) -> None:
    assert found(throttled(tmp_path, 0.97, 748), "clock") == []


# ---- together --------------------------------------------------------------------------------------------------------


def test_a_healthy_run_has_no_diagnosis(tmp_path: Path) -> None:
    """Compute throughout, gradients reduced beside it."""

    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        compute(trace, start + 10, 490)
        compute(trace, start + 500, 500, backward=True)
        reduce(trace, number, start + 600, 100, 5_000_000)

    assert run_of(tmp_path, 2, step).diagnosis == []


def said(code: str, gain_ms: float | None, explained_by: tuple[str, ...] = ()) -> Diagnosis:
    return Diagnosis(code, "info", "m", gain_ms=gain_ms, explained_by=explained_by)


class TestTogether:
    """The order of diagnoses, symptoms whose cause is named, a rule that fails."""

    @pytest.fixture
    def diagnose(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
        def run(*answers: Finding | Exception) -> list[Finding]:
            def rule(_: Any) -> list[Finding]:
                answer = next(left)
                if isinstance(answer, Exception):
                    raise answer
                return [answer]

            left = iter(answers)
            module = type("module", (), {"rule": staticmethod(rule)})
            monkeypatch.setattr(rules, "RULES", tuple(f"r{i}" for i in range(len(answers))))
            monkeypatch.setattr(rules.importlib, "import_module", lambda name: module)
            return rules.diagnose(None)  # type: ignore[arg-type]  # no rule looks at it

        return run

    def test_the_largest_gain_comes_first_and_unknown_gains_last(self, diagnose: Any) -> None:
        assert [d.code for d in diagnose(said("a", 1), said("b", None), said("c", 3))] == ["c", "a", "b"]

    def test_a_symptom_is_silent_where_its_cause_is_named(self, diagnose: Any) -> None:
        symptom = said("idle", 4, ("loader",))
        assert [d.code for d in diagnose(symptom, said("loader", 3))] == ["loader"]
        assert [d.code for d in diagnose(symptom, said("loader", 1))] == ["idle", "loader"]
        assert [d.code for d in diagnose(symptom, said("other", 9))] == ["other", "idle"]

    def test_a_rule_that_fails_costs_only_itself(self, diagnose: Any) -> None:
        first, second = diagnose(said("a", 1), ValueError("no such column"))
        assert (first.code, second.code) == ("a", "rule_failed")
        assert "r1" in second.message and "no such column" in second.message


def test_every_rule_is_explained() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    assert [name for name in rules.RULES if f"| `{name}` |" not in docs] == []


def test_every_rule_is_a_module_whose_codes_are_its_name() -> None:
    folder = Path(rules.__file__).parent
    modules = {p.stem for p in folder.glob("*.py") if "\ndef rule(run: Run)" in p.read_text(encoding="utf-8")}
    assert set(rules.RULES) == modules and len(rules.RULES) == len(modules)
    for name in rules.RULES:
        assert f'"{name}"' in (folder / f"{name}.py").read_text(encoding="utf-8")
