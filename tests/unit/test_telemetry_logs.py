"""Logs of other tools: every kind of damage, unit, and clock, in files built here and in the shared cases."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest

from tb_chopper.backend.errors import InvalidSelection, UnreadableFile
from tb_chopper.backend.readers import telemetry_logs
from tb_chopper.backend.readers.log_times import TimeBase
from tb_chopper.backend.schema import TelemetryLog
from torch_ext import telemetry_format

S = 10**9
NOON = int(datetime(2026, 3, 31, 12, tzinfo=timezone.utc).timestamp()) * S


def read(tmp_path: Path, text: str | bytes, name: str = "log.csv", **base: object) -> TelemetryLog:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return telemetry_logs.read(path, TimeBase(**base))


def codes(log: TelemetryLog) -> set[str]:
    return {f.code for f in log.findings}


def column(log: TelemetryLog, name: str, gpu: int = 0) -> list[float]:
    return log.samples.loc[log.samples["gpu"] == gpu, name].tolist()


NVIDIA = """timestamp, index, power.draw [W], clocks.current.sm [MHz], clocks.current.memory [MHz], temperature.gpu, \
utilization.gpu [%], clocks_event_reasons.active
2026/03/31 12:00:00.500, 0, 512.51 W, 1755 MHz, 2619 MHz, 58, 99 %, 0x0000000000000004
2026/03/31 12:00:00.503, 1, [N/A], 1740 MHz, 2619 MHz, 61, 98 %, 0x0000000000000000
timestamp, index, power.draw [W], clocks.current.sm [MHz], clocks.current.memory [MHz], temperature.gpu, \
utilization.gpu [%], clocks_event_reasons.active
2026/03/31 12:00:01.500, 0, 514.00 W, 1750 MHz, 2619 MHz, 58, 99 %, 0x0000000000000024
2026/03/31 12:00:01.503, 1, [Not Supported], 1735 MHz, 2619 MHz, [Unknown Error], 98 %, 0x0000000000000001
2026/03/31 12:00:02.500, 0, 51"""


def test_nvidia_smi(tmp_path):
    log = read(tmp_path, NVIDIA, time_zone="UTC")
    assert column(log, "power_w") == [512.51, 514.0] and column(log, "clock_mhz") == [1755, 1750]
    assert column(log, "throttle") == ["power:100", "power:100 thermal:100"]
    assert column(log, "throttle", 1) == ["none", "none"], "idle is no throttle"
    assert np.isnan(column(log, "power_w", 1)).all() and np.isnan(column(log, "temperature_c", 1)[1])
    assert column(log, "t_ns")[0] == pytest.approx(NOON + S // 2, abs=1_000_000)
    assert "telemetry_cut" in codes(log) and log.gpus["source"].tolist() == ["nvidia-smi"] * 2


@pytest.mark.parametrize("zone, hours", [("Europe/Berlin", 2), ("+05:30", 5.5), ("America/New_York", -4), ("UTC", 0)])
def test_local_time_with_a_zone(tmp_path, zone, hours):
    log = read(tmp_path, NVIDIA, time_zone=zone)
    assert log.times == "local" and "no_time_zone" not in codes(log)
    assert column(log, "t_ns")[0] == pytest.approx(NOON + S // 2 - hours * 3600 * S, abs=1_000_000)


def test_local_time_without_a_zone(tmp_path):
    assert "no_time_zone" in codes(read(tmp_path, NVIDIA))
    with pytest.raises(InvalidSelection, match="no time zone"):
        read(tmp_path, NVIDIA, time_zone="Mars/Olympus")
    # A moment of the run inside the log tells the zone: 12:00 there was 06:30 UTC.
    log = read(tmp_path, NVIDIA, near_ns=NOON + S - int(5.5 * 3600 * S))
    assert "guessed_time_zone" in codes(log) and "+05:30" in str(log.findings)
    assert column(log, "t_ns")[0] == pytest.approx(NOON + S // 2 - 5.5 * 3600 * S, abs=1_000_000)
    with pytest.raises(UnreadableFile, match="give the time zone"):
        read(tmp_path, NVIDIA, near_ns=NOON + 40 * 86400 * S)


def test_long_local_log_fits_several_zones(tmp_path):
    rows = "".join(f"2026/03/31 {h:02d}:00:00.000, 0, 500 W\n" for h in range(24))
    with pytest.raises(UnreadableFile, match="more than one"):
        read(tmp_path, "timestamp, index, power.draw [W]\n" + rows, near_ns=NOON)


def test_end_of_summer_time(tmp_path):
    """02:30 comes twice on 25 October in Berlin; the order of the samples tells which is which."""
    times = ["01:59:00", "02:30:00", "02:59:00", "02:00:00", "02:30:00", "03:00:00"]
    log = read(tmp_path, "timestamp, index, power.draw [W]\n" + "".join(f"2026/10/25 {t}.0, 0, 5 W\n" for t in times),
               time_zone="Europe/Berlin")
    assert (np.diff(column(log, "t_ns")) / 60 / S).tolist() == [31, 29, 1, 30, 30]


AMD = """'CTRL' + 'C' to stop watching output:
timestamp,gpu,gfx_activity,umc_activity,socket_power,gfx_0_clk,gfx_0_max_clk,gfx_1_clk,gfx_2_clk,mem_0_clk,hotspot,vcn_activity,\
throttle_status
1785881113,0,97,40,747,1900,2100,1920,65535,1300,61,[N/A, 0, 0, 0],UNTHROTTLED
1785881113,1,96,41,N/A,N/A,N/A,N/A,N/A,1300,60,[N/A, 0, 0, 0],UNTHROTTLED
timestamp,gpu,gfx_activity,umc_activity,socket_power,gfx_0_clk,gfx_0_max_clk,gfx_1_clk,gfx_2_clk,mem_0_clk,hotspot,vcn_activity,\
throttle_status
1785881114,0,98,40,748,1880,2100,1890,0,1300,62,[N/A, 0, 0, 0],UNTHROTTLED
1785881114,1,98,40,740,1870,2100,1890,1900,1300,N/A,[N/A, 0, 0, 0],UNTHROTTLED
"""


def test_amd_smi_watch(tmp_path):
    log = read(tmp_path, AMD)
    assert column(log, "clock_mhz") == [1910, 1885], "mean over the dies with a valid reading"
    assert column(log, "clock_mhz", 1)[1] == pytest.approx((1870 + 1890 + 1900) / 3)
    assert np.isnan(column(log, "clock_mhz", 1)[0]) and np.isnan(column(log, "power_w", 1)[0])
    assert column(log, "clock_limit_mhz") == [2100, 2100] and column(log, "temperature_c") == [61, 62]
    assert "telemetry_whole_seconds" in codes(log) and log.samples["uncertainty_ns"].max() == S // 2
    assert column(log, "t_ns") == [1785881113 * S + S // 2, 1785881114 * S + S // 2], "the middle of what it may be"


def test_columns_that_change_in_the_middle(tmp_path):
    log = read(tmp_path, "timestamp,gpu,socket_power\n1785881113,0,500\n\ntimestamp,gpu,gfx_0_clk\n1785881114,0,1900\n")
    assert len(log.samples) == 2 and column(log, "power_w")[0] == 500 and column(log, "clock_mhz")[1] == 1900


def test_several_samples_within_a_printed_second(tmp_path):
    rows = "".join(f"{1785881113 + i // 4},0,{500 + i}\n" for i in range(8))
    log = read(tmp_path, "timestamp,gpu,socket_power\n" + rows)
    assert np.diff(column(log, "t_ns")).tolist() == [S // 4] * 7
    assert column(log, "power_w") == [500.0 + i for i in range(8)]


def test_rocm_smi_ragged(tmp_path):
    log = read(tmp_path, "timestamp,device,power_watts,power_cap_watts\n1754586812,card0,154.0\n"
                         "1754586812,card1,145.0\n1754586812,\n1754586817,card0,155.0\n1754586817,card1,146.0\n")
    assert column(log, "power_w") == [154, 155] and column(log, "power_w", 1) == [145, 146]
    assert [f.count for f in log.findings if f.code == "telemetry_partial_rows"] == [1]


def test_rocm_smi_names_with_units(tmp_path):
    log = read(tmp_path, "time (s),device,Temperature (Sensor junction) (C),sclk clock speed:,"
                         "Current Socket Graphics Package Power (W),GPU use (%)\n"
                         "1754586812.25,card0,61.0,(2100Mhz),700.0,99\n")
    sample = log.samples.iloc[0]
    assert sample[["temperature_c", "clock_mhz", "power_w", "activity_pct"]].tolist() == [61, 2100, 700, 99]


@pytest.mark.parametrize("header, value, used", [
    ("memory.used [MiB]", "40960 MiB", 40960 * 2**20), ("memory.used [MiB]", "40960", 40960 * 2**20),
    ("memory.used [MiB]", "[N/A]", None), ("used_vram", "283", 283 * 2**20),
    ("VRAM Total Used Memory (B)", "297046016", 297046016), ("memory_used_bytes", "65536000", 65536000),
    ("vram_used_bytes", "297771008", 297771008), ("used_vram", "-1", None), ("fb", "18446744073709551615", None)])
def test_used_memory_in_bytes(tmp_path, header, value, used):
    """nvidia-smi and amd-smi count in powers of 1024 (their manuals), rocm-smi in bytes."""
    log = read(tmp_path, f"timestamp,gpu,power_w,{header}\n1774958400.5,0,300,{value}\n")
    found = column(log, "memory_used_bytes")
    assert np.isnan(found).all() if used is None else found == [used]


def test_used_memory_of_dmon(tmp_path):
    """`nvidia-smi dmon -s pum`: fb is the frame buffer in MB (powers of 1024)."""
    log = read(tmp_path, "#Date Time gpu pwr sm mem fb bar1\n#YYYYMMDD HH:MM:SS Idx W % % MB MB\n"
                         "20260331 12:00:00 0 300 98 40 61440 5\n", time_zone="UTC")
    assert column(log, "memory_used_bytes") == [60 * 2**30]
    assert column(log, "memory_activity_pct") == [40]


def test_running_total_under_the_name_of_a_percentage(tmp_path):
    log = read(tmp_path, "timestamp,gpu,gfx_activity,socket_power\n1754586812,0,110778690,700\n")
    assert np.isnan(column(log, "activity_pct")).all() and "telemetry_not_a_percentage" in codes(log)


def test_exported_gpu_metrics(tmp_path):
    """The paper's own table: KFD nodes as GPU numbers, CLOCK_MONOTONIC, lists per die."""
    text = ('ts,gpu,current_gfxclk,current_gfxclks,current_uclk,current_socket_power\n'
            '5000000000,2,65535,"[1900, 1920, 65535, 65535]",1300,700\n'
            '5100000000,2,65535,"[1880, 1900, 65535, 65535]",1300,710\n')
    with pytest.raises(UnreadableFile, match="not epoch times"):
        read(tmp_path, text)
    log = read(tmp_path, text, anchor=(5 * S, NOON))
    assert log.times == "anchored" and log.samples["t_ns"].tolist() == [NOON, NOON + S // 10]
    assert column(log, "clock_mhz", 2) == [1910, 1890]


def test_unit_of_the_numbers_does_not_matter(tmp_path):
    for factor in (1, 10**3, 10**6, 10**9):
        log = read(tmp_path, f"timestamp,gpu,power_w\n{1754586812 * factor},0,5\n{1754586813 * factor},0,5\n")
        assert abs(log.samples["t_ns"].iloc[0] - 1754586812 * S) <= S // 2


def test_cpu_table_without_command_lines(tmp_path):
    text = ("cpu,ts,percent,name,cmdline\n" + "".join(
        f"{cpu},{1754586812 + t},{50 * cpu},python,python train.py --token hunter2\n"
        for t in range(2) for cpu in range(3)) + "0,1754586814,0,,\n")
    log = read(tmp_path, text)
    assert log.cpu[["cpu", "busy_pct"]].to_numpy().tolist() == [[1, 50], [2, 100], [1, 50], [2, 100], [-1, 0]]
    assert "hunter2" not in log.cpu.to_csv()


@pytest.mark.parametrize("content, message", [
    (b"", "empty"), (b"  \n\n", "empty"), (b"hello\nworld\n", "no telemetry log"),
    (b"timestamp,gpu,socket_power\n", "no row"), (b"gpu,socket_power\n0,500\n", "no time"),
    (b"timestamp,gpu,socket_power\nyesterday,0,500\n", "no time that could be read"),
    (b"record,before_ns,after_ns\n", "no whole record"), (b"record,before_ns,after_ns\ngpu,1,2\n", "no whole clock"),
    (b"# gpu    pwr\n# Idx      W\n", "no whole row"),
])
def test_useless_files_say_so_in_one_line(tmp_path, content, message):
    with pytest.raises(UnreadableFile, match=message) as error:
        read(tmp_path, content)
    assert "\n" not in str(error.value)


def test_pickle_is_not_opened(tmp_path):
    with pytest.raises(UnreadableFile, match="can run code"):
        read(tmp_path, b"cos\nsystem\n", name="gpu.pkl")


def test_windows_redirect(tmp_path):
    log = read(tmp_path, NVIDIA.replace("\n", "\r\n").encode("utf-16"), time_zone="UTC")
    assert column(log, "power_w") == [512.51, 514.0]


@pytest.mark.parametrize("counter, unit, truth", [
    ([100.0, 600.0, 1100.0], "[J]", 1000), ([1e5, 6e5, 11e5], "[mJ]", 1000), ([1e5, 6e5, 11e5], "", 1000),
])
def test_energy_units(tmp_path, counter, unit, truth):
    rows = "".join(f"{1785881113 + i},0,{e},500\n" for i, e in enumerate(counter))
    log = read(tmp_path, f"timestamp,gpu,total_energy_consumption {unit},socket_power\n" + rows)
    energy = column(log, "energy_j")
    assert energy[-1] - energy[0] == pytest.approx(truth)
    assert ("energy_in_mj" in codes(log)) == (unit == "" and counter[0] == 1e5)


def test_energy_that_disagrees_with_power(tmp_path):
    rows = "".join(f"{1785881113 + i},0,{1000 * i},500\n" for i in range(4))
    assert "energy_disagrees" in codes(read(tmp_path, "timestamp,gpu,total_energy_consumption,socket_power\n" + rows))


def test_energy_counter_that_restarts(tmp_path):
    rows = "".join(f"{1785881113 + i},0,{e}\n" for i, e in enumerate([5000, 5500, 20, 520]))
    log = read(tmp_path, "timestamp,gpu,total_energy_consumption\n" + rows)
    assert np.diff(column(log, "energy_j")).tolist() == [500, 0, 500] and "energy_restarted" in codes(log)


def own(*lines: str) -> str:
    return telemetry_format.header() + "".join(lines)


def test_own_log_keeps_what_it_says(tmp_path):
    line = telemetry_format.line
    log = read(tmp_path, own(
        line("start", 0, 0, text="node0"),
        line("gpu_info", 0, 0, gpu=0, pci_address="0000:05:00.0", source="amdsmi", text="AMD Instinct MI300X"),
        line("cpu_info", 0, 0, cpu_cores="0:0 1:1 2:0 3:1"),
        line("clock", 0, 10, realtime_ns=NOON, boottime_ns=7),
        line("gpu", 100, 300, gpu=0, clock_mhz=1900.5, power_w=700, clock_limit_mhz=2100, throttle="power:40"),
        "gpu,500,7",  # a full disk cut this one
        "\n", line("gpu", 1100, 1300, gpu=0, clock_mhz=1899, throttle="none"),
        line("cpu", 2000, 2100, cpu_pct="0:97 2:12.5", cpu_mhz="0:3700", cpu_threads="0:2"),
        line("cpu", 3000, 3100, cpu_pct=""), line("stop", 4000, 4000, text="time is up")), "x.telemetry.csv")
    samples = log.samples
    assert samples["t_ns"].tolist() == [NOON + 195, NOON + 1195] and samples["uncertainty_ns"].tolist() == [100, 100]
    assert samples["clock_limit_mhz"].tolist() == [2100, 2100] and samples["throttle"].tolist() == ["power:40", "none"]
    assert log.gpus.iloc[0][["host", "name", "pci_address", "source"]].tolist() == [
        "node0", "AMD Instinct MI300X", "0000:05:00.0", "amdsmi"]
    assert log.cores["core"].tolist() == [0, 1, 0, 1]
    assert log.cpu[["cpu", "busy_pct"]].to_numpy().tolist() == [[0, 97], [2, 12.5], [-1, 0]]
    assert log.cpu["threads"].iloc[0] == 2 and log.cpu["clock_mhz"].iloc[0] == 3700
    assert codes(log) == {"telemetry_cut"}


def test_part_of_a_long_log(tmp_path):
    line = telemetry_format.line
    rows = [line("start", 0, 0, text="n")]
    for i in range(600):
        rows.append(line("clock", i * S, i * S + 10, realtime_ns=NOON + i * S))
        rows.append(line("gpu", i * S + 1, i * S + 1, gpu=0, power_w=i))
    rows.append(line("note", 600 * S, 600 * S, text="said"))
    path = tmp_path / "n.telemetry.csv"
    path.write_text(own(*rows))
    part = telemetry_logs.read(path, within=(NOON + 100 * S, NOON + 110 * S))
    read = column(part, "power_w")
    assert set(range(95, 116)) <= set(read) <= set(range(93, 118)) and len(part.clocks) == 600
    whole = telemetry_logs.read(path).samples
    assert part.samples["t_ns"].tolist() == whole.loc[whole["power_w"].isin(read), "t_ns"].tolist()
    assert any("said" in f.message for f in part.findings)
    far = telemetry_logs.read(path, within=(0, 1))
    assert far.samples.empty and len(far.clocks) == 600


def test_own_log_with_garbage(tmp_path):
    line = telemetry_format.line
    clock = line("clock", 0, 10, realtime_ns=NOON)
    good = line("gpu", 100, 300, gpu=0, clock_mhz=1900, power_w=65535)
    garbage = "\x00\x00\x00,\xff" + "\n" + good.replace("1900", "19x0") + telemetry_format.header() + "gpu,1,2,3\n"
    log = read(tmp_path, own(clock, good, garbage).encode("latin-1"), "x.telemetry.csv")
    assert np.isnan(log.samples["power_w"]).all() and {"telemetry_sentinel", "telemetry_cut"} <= codes(log)
    assert log.samples["clock_mhz"].tolist() == [1900]


def test_format_refuses_what_a_record_does_not_have():
    with pytest.raises(TypeError, match="cpu_pct"):
        telemetry_format.line("gpu", 1, 2, cpu_pct="0:1")
    assert telemetry_format.line("note", 1, 2, text='a,"b"\nc').count(",") == len(telemetry_format.NAMES) - 1


# The shared cases: the numbers are those of the files beside them.

def expected(shared: Path, case: str) -> dict[str, object]:
    return json.loads((shared / "cases" / case / "expected.json").read_text())


def test_case_sentinels(shared):
    log = telemetry_logs.read(shared / "cases/47_smi_sentinels/run/smi.csv")
    want = expected(shared, "47_smi_sentinels")
    assert np.mean(column(log, "power_w")) == want["gpu0_mean"]
    assert np.isnan(column(log, "clock_mhz", 2)).all() and want["gpu2_clock"] is None
    power_of = dict(zip(log.gpus["gpu"], log.gpus["power_of"], strict=True))
    assert power_of == {0: -1, 1: 0, 2: -1, 3: -1} and np.isnan(column(log, "power_w", 1)).all()
    messages = " ".join(f.message for f in log.findings)
    assert "GPU 1" in messages and "shares the module with GPU 0" in messages and "GPU 3 reads 0 W" in messages


def test_case_monotonic(shared):
    run = shared / "cases/49_smi_monotonic/run"
    with pytest.raises(UnreadableFile, match=r"not epoch times \(58 days"):
        telemetry_logs.read(run / "clock_boottime.csv")
    anchor = json.loads((run / "anchor.json").read_text())
    base = TimeBase(anchor=(anchor["monotonic_ns"], anchor["realtime_ns"]))
    log = telemetry_logs.read(run / "clock_boottime.csv", base)
    assert log.samples["t_ns"].iloc[0] == pytest.approx(anchor["realtime_ns"], abs=1000)


def test_case_dmon(shared):
    log = telemetry_logs.read(shared / "cases/51_dmon/run/dmon.log", TimeBase(time_zone="UTC"))
    want = expected(shared, "51_dmon")["power_mean"]
    assert [len(column(log, "power_w", g)) for g in (0, 1)] == [12, 12]
    assert [np.mean(column(log, "power_w", g)) for g in (0, 1)] == want
    assert np.isnan(column(log, "memory_temperature_c")).all() and column(log, "temperature_c")[0] == 60
    with pytest.raises(UnreadableFile, match="-o DT"):
        telemetry_logs.read(shared / "cases/51_dmon/run/dmon_nodate.log")


@pytest.mark.parametrize("name", ["energy.csv", "energy_wrap.csv"])
def test_case_energy(shared, name):
    log = telemetry_logs.read(shared / "cases/53_energy_units/run" / name)
    energy = column(log, "energy_j")
    assert energy[-1] - energy[0] == pytest.approx(expected(shared, "53_energy_units")["joules"], rel=1e-6)
    assert ("energy_wrapped" in codes(log)) == (name == "energy_wrap.csv") and "energy_disagrees" not in codes(log)


@pytest.mark.parametrize("kind, column_name, field", [
    ("power", "power_w", 2), ("temp", "temperature_c", 3), ("usage", "activity_pct", 2)])
def test_real_rocm_smi_logs(shared, kind, column_name, field):
    (path,) = (shared / "telemetry").glob(f"gpu_{kind}_*.csv")
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    rows = [r for r in rows if r[1]]
    log = telemetry_logs.read(path)
    for gpu in range(8):
        truth = [float(r[field]) for r in rows if r[1] == f"card{gpu}"]
        assert column(log, column_name, gpu) == truth and len(truth) > 350
