"""The sampler as a process: one per host, ends with the training, hurt by nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tb_chopper.backend.readers import telemetry_logs
from tb_chopper.backend.readers.telemetry import to_realtime
from torch_ext import owners, sampling, telemetry_format
from torch_ext.telemetry_log import Log

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the sampler's CPU source reads /proc")


def run_python(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """A training that is this code."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def wait_for(condition: Callable[[], object], seconds: float = 15.0) -> object:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def log_of(folder: Path) -> Path:
    (found,) = folder.glob(f"*{telemetry_format.SUFFIX}")
    return found


def holds(folder: Path, text: str) -> Callable[[], bool]:
    return lambda: any(text in p.read_text() for p in folder.glob(f"*{telemetry_format.SUFFIX}"))


def is_sampled(folder: Path) -> bool:
    """A sampler holds the folder's lock."""
    file = owners.open_file(folder)
    try:
        return not owners.lock(file)
    finally:
        os.close(file)


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """A log directory; no sampler may outlive the test."""
    yield tmp_path / "run"
    if (tmp_path / "run").exists():
        wait_for(lambda: not is_sampled(tmp_path / "run"))


TRAINING = """
    import sys, time
    from torch_ext.sampling import start_telemetry
    started = start_telemetry(sys.argv[1])
    print(started.sampler_pid, flush=True)
    time.sleep(60)
"""


def proc_stat_busy() -> dict[str, tuple[int, int]]:
    """Busy and all ticks by CPU, read on its own here."""
    out = {}
    for row in Path("/proc/stat").read_text().splitlines():
        if row.startswith("cpu") and row[3] != " ":
            v = list(map(int, row.split()[1:9]))
            out[row.split()[0][3:]] = (sum(v) - v[3] - v[4], sum(v))
    return out


def test_cpu_values_agree_with_proc_stat(folder):
    with sampling.telemetry(folder):
        wait_for(holds(folder, "\ncpu,"))
        before, t0 = proc_stat_busy(), time.monotonic_ns()
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            pass
        after, t1 = proc_stat_busy(), time.monotonic_ns()
        time.sleep(0.5)
    log = telemetry_logs.read(log_of(folder))
    cpu = log.cpu[(log.cpu["monotonic_ns"] > t0) & (log.cpu["monotonic_ns"] < t1)]
    times = np.sort(cpu["monotonic_ns"].unique())
    assert len(times) >= 6
    weight = dict(zip(times[1:], np.diff(times), strict=True))
    for name, (busy, total) in after.items():
        truth = 100 * (busy - before[name][0]) / (total - before[name][1])
        rows = cpu[(cpu["cpu"] == int(name)) & cpu["monotonic_ns"].isin(list(weight))]
        sampled = sum(weight[t] * p for t, p in zip(rows["monotonic_ns"], rows["busy_pct"], strict=True))
        assert sampled / sum(weight.values()) == pytest.approx(truth, abs=12), f"cpu {name}"


def test_times_are_those_of_the_clocks(folder):
    with sampling.telemetry(folder):
        wait_for(holds(folder, "\nclock,"))
        time.sleep(1.2)
        now, monotonic = time.time_ns(), time.monotonic_ns()
    log = telemetry_logs.read(log_of(folder))
    at = to_realtime(np.array([monotonic]), log.clocks["monotonic_ns"].to_numpy(),
                               log.clocks["realtime_ns"].to_numpy())
    assert abs(int(at[0]) - now) < 2_000_000
    assert (log.clocks["uncertainty_ns"] < 5_000_000).all() and "telemetry_no_end" not in {f.code for f in log.findings}
    gaps = np.diff(log.cpu["monotonic_ns"].unique())
    assert np.median(gaps) == pytest.approx(225e6, abs=60e6), "five times per second, on a grid of 50 ms"


def test_one_sampler_however_many_ask(folder):
    ranks = [run_python(TRAINING, folder) for _ in range(4)]
    try:
        said = [rank.stdout.readline().strip() for rank in ranks]
        samplers = [int(s) for s in said if s != "None"]
        assert len(samplers) == 1, said
        wait_for(holds(folder, "\nclock,"))
        # Killing the rank that started it leaves the sampler to the others.
        ranks[said.index(str(samplers[0]))].kill()
        time.sleep(1.5)
        assert is_sampled(folder)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.communicate()
    wait_for(holds(folder, "the training has ended"))
    assert log_of(folder).read_text().count("\nstart,") == 1


def test_ends_with_a_killed_training(folder):
    training = run_python(TRAINING, folder)
    wait_for(holds(folder, "\nclock,"))
    training.send_signal(signal.SIGKILL)
    training.communicate()
    wait_for(holds(folder, "\nstop,"))
    assert not telemetry_logs.read(log_of(folder)).cpu.empty


def test_killed_sampler_leaves_a_readable_log_and_the_training(folder):
    training = run_python(TRAINING, folder)
    sampler = int(training.stdout.readline())
    wait_for(holds(folder, "\ncpu,"))
    time.sleep(0.7)
    os.kill(sampler, signal.SIGKILL)
    wait_for(lambda: not is_sampled(folder))
    log = telemetry_logs.read(log_of(folder))
    assert "telemetry_no_end" in {f.code for f in log.findings} and len(log.clocks)
    assert training.poll() is None
    # The next one that asks gets a new sampler, which goes on in the same file.
    with sampling.telemetry(folder):
        wait_for(lambda: log_of(folder).read_text().count("\nstart,") == 2)
    training.kill()
    training.communicate()
    assert telemetry_logs.read(log_of(folder)).clocks["session"].nunique() == 2


def test_same_training_starts_and_stops_again(folder):
    for _ in range(2):
        with sampling.telemetry(folder):
            wait_for(holds(folder, "\nclock,"))
    text = log_of(folder).read_text()
    assert text.count("\nstart,") == text.count("\nstop,") == 2


def test_nothing_of_environment_or_commands_is_written(folder, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_HOST", "hunter2hunter2")
    with sampling.telemetry(folder):
        wait_for(holds(folder, "\ncpu,"))
        time.sleep(1.2)
    text = log_of(folder).read_text()
    assert "hunter2" not in text and "python" not in text.lower() and "--out" not in text


def test_folder_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="the training goes on") as warned, sampling.telemetry(tmp_path / "file"):
        pass
    assert len(warned) == 1


def test_by_hand(folder):
    sample = [sys.executable, "-m", "torch_ext.sampler", "--out", str(folder)]
    first = subprocess.Popen([*sample, "--seconds", "2.5", "--hz", "50"], cwd=ROOT)
    wait_for(holds(folder, "\nclock,"))
    second = subprocess.run(sample, cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 2 and "already runs" in second.stderr and second.stderr.count("\n") == 1
    assert first.wait(15) == 0 and "time is up" in log_of(folder).read_text()
    bad = subprocess.run([*sample, "--hz", "1000"], cwd=ROOT, capture_output=True, text=True)
    assert bad.returncode == 2 and "between 0 and 100" in bad.stderr


def test_interrupt_ends_it_cleanly(folder):
    sampler = subprocess.Popen([sys.executable, "-m", "torch_ext.sampler", "--out", str(folder)], cwd=ROOT)
    wait_for(holds(folder, "\nclock,"))
    sampler.send_signal(signal.SIGINT)
    assert sampler.wait(15) == 0
    assert "SIGINT" in log_of(folder).read_text().splitlines()[-1]


def test_every_cut_of_a_log_is_readable(tmp_path, folder):
    with sampling.telemetry(folder):
        wait_for(holds(folder, "\nclock,"))
        time.sleep(0.8)
    whole = log_of(folder).read_bytes()
    first_clock = whole.index(b"\n", whole.index(b"\nclock,") + 1) + 1
    full = telemetry_logs.read(log_of(folder)).cpu
    cut = tmp_path / "cut.telemetry.csv"
    for n in {*range(first_clock, first_clock + 400, 23), len(whole) - 1}:
        cut.write_bytes(whole[:n])
        cpu = telemetry_logs.read(cut).cpu
        # Times move by less than the clocks drift when pairs are missing; the values are the same.
        assert (cpu[["monotonic_ns", "cpu", "busy_pct"]].to_numpy()
                == full[["monotonic_ns", "cpu", "busy_pct"]].to_numpy()[:len(cpu)]).all(), n


def test_full_disk(tmp_path):
    """A small tmpfs that fills up and empties again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs")
    try:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(48 << 10))
        script = """
            import sys, time
            from torch_ext import telemetry_format, telemetry_log
            from pathlib import Path
            telemetry_log.RETRY_NS = 0
            log = telemetry_log.Log(Path(sys.argv[1]) / "h.telemetry.csv")
            now = time.monotonic_ns()
            def write(n):
                for i in range(n):
                    log.add(telemetry_format.line("clock", i, i + 1, realtime_ns=10**18 + i))
                log.flush(now, always=True)
            for i in range(20): write(50)
            print("full", flush=True); sys.stdin.readline()
            write(5); log.close(); print("done", flush=True)
        """
        training = run_python(script, disk, stdin=subprocess.PIPE)
        assert training.stdout.readline() == "full\n"
        assert len(telemetry_logs.read(disk / "h.telemetry.csv").clocks) > 50
        ballast.unlink()
        out, err = training.communicate("\n", timeout=20)
        assert (out, training.returncode) == ("done\n", 0)
        assert err.count("\n") == 1 and "the training goes on" in err and "No space left" in err
        log = telemetry_logs.read(disk / "h.telemetry.csv")
        assert any("records were lost" in f.message for f in log.findings)
        assert list(log.clocks["realtime_ns"].tail(5)) == [10**18 + i for i in range(5)]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_log_that_ends_in_half_a_line_goes_on_with_a_new_one(tmp_path):
    path = tmp_path / "h.telemetry.csv"
    path.write_text(telemetry_format.header() + telemetry_format.line("clock", 1, 2, realtime_ns=10**18) + "gpu,12,1")
    log = Log(path)
    log.add(telemetry_format.line("clock", 3, 4, realtime_ns=10**18 + 2))
    log.close()
    read = telemetry_logs.read(path)
    assert list(read.clocks["monotonic_ns"]) == [1, 3]
    assert [f.count for f in read.findings if f.code == "telemetry_cut"] == [1]


def test_owners_that_ended_or_left_do_not_count(tmp_path):
    file = owners.open_file(tmp_path)
    child = subprocess.Popen(["sleep", "60"])
    for pid in (os.getpid(), os.getpid(), child.pid):
        owners.add(file, pid)
    assert sorted(owners.living(file)) == sorted({os.getpid(), child.pid})
    child.kill()
    wait_for(lambda: owners.living(file) == [os.getpid()])  # a zombie has ended
    child.wait()
    owners.remove(file, os.getpid())
    assert owners.living(file) == [os.getpid()], "one of two wishes is left"
    owners.remove(file, os.getpid())
    assert owners.living(file) == []
    os.close(file)
