"""Damaged trace files: what is whole is used, what is lost is said, and only a file of no use fails, in one line."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.readers import kineto
from tb_chopper.backend.schema import Trace
from tests.builders import Layout, TraceBuilder

N_STEPS = 3
N_KERNELS = 6 * N_STEPS


def text(layout: Layout = "indented", n: int = N_STEPS) -> bytes:
    t = TraceBuilder(world_size=2)
    for i in range(n):
        t.training_step(i, 1000 * i)
    return t.text(layout).encode()


def read(content: bytes, path: Path, **options: int) -> Trace:
    path.write_bytes(content)
    return kineto.read(path, **options)


def counts(trace: Trace) -> dict[str, int]:
    return {f.code: f.count for f in trace.findings}


def severity(trace: Trace, code: str) -> str:
    return next(f.severity for f in trace.findings if f.code == code)


def name_of(content: bytes, name: bytes, nth: int = 0) -> tuple[int, int]:
    """Where the n-th event of this name has its name."""
    start = -1
    for _ in range(nth + 1):
        start = content.index(b'"' + name + b'"', start + 1)
    return start + 1, start + 1 + len(name)


REPAIRS = {
    "bad_utf8": b"gemm\xff\xfe_fwd",
    "control_characters": b"gemm\x01\n\t_fwd",
    "escaped_backslash": b"C:\\Users\\new\\gemm",
    "unescaped_quotes": b'say "gemm" {"a": 1}, now',
}
REPAIRED_NAMES = {
    "bad_utf8": "gemm\ufffd\ufffd_fwd",
    "control_characters": "gemm\x01\n\t_fwd",
    "escaped_backslash": "C:\\Users\\new\\gemm",
    "unescaped_quotes": 'say "gemm" {"a": 1}, now',
}


@pytest.mark.parametrize("layout", ["indented", "compact"])
@pytest.mark.parametrize("chunk_bytes", [200, 1 << 20])
@pytest.mark.parametrize("code", REPAIRS)
def test_a_bad_name_is_repaired(tmp_path: Path, code: str, layout: Layout, chunk_bytes: int) -> None:
    content = text(layout)
    for nth in (3, 1):
        start, end = name_of(content, b"gemm_fwd", nth)
        content = content[:start] + REPAIRS[code] + content[end:]
    trace = read(content, tmp_path / "a.json", chunk_bytes=chunk_bytes)
    assert trace.complete
    assert len(trace.device) == N_KERNELS
    assert list(trace.device["name"]).count(REPAIRED_NAMES[code]) == 2
    assert counts(trace) == {code: 2}
    assert severity(trace, code) == "warning"


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none(tmp_path: Path, number: str) -> None:
    content = text().replace(b'"blocks per SM": 2.0', b'"blocks per SM": ' + number.encode())
    trace = read(content, tmp_path / "a.json")
    assert len(trace.device) == N_KERNELS
    assert trace.device["blocks_per_sm"].isna().all()
    assert counts(trace) == {"non_finite_number": N_KERNELS}


def test_words_like_nan_stay_in_names(tmp_path: Path) -> None:
    content = text().replace(b'"blocks per SM": 2.0', b'"blocks per SM": inf').replace(b'"gemm_fwd"', b'"f: nan, inf"')
    assert (read(content, tmp_path / "a.json").device["name"] == "f: nan, inf").sum() == 2 * N_STEPS


@pytest.mark.parametrize("chunk_bytes", [200, 1 << 20])
@pytest.mark.parametrize("broken", ['"dur": 45.0.0', '"dur": ', '"dur" 45.000', "dur: 45"])
def test_a_syntax_error_costs_its_event_and_is_located(tmp_path: Path, broken: str, chunk_bytes: int) -> None:
    content = text()
    at = content.index(b'"dur": 45.000')
    content = content[:at] + broken.encode() + content[at + len(b'"dur": 45.000') :]
    trace = read(content, tmp_path / "a.json", chunk_bytes=chunk_bytes)
    assert not trace.complete
    assert severity(trace, "syntax_error") == "error"
    assert len(trace.device) == N_KERNELS - 1
    message = next(f.message for f in trace.findings if f.code == "syntax_error")
    line = content[:at].count(b"\n") + 1
    assert re.search(rf"a\.json, line ({line}|{line + 1}) column \d+", message)


@pytest.mark.parametrize("chunk_bytes", [200, 1 << 20])
def test_missing_and_doubled_commas_cost_nothing(tmp_path: Path, chunk_bytes: int) -> None:
    built = text("compact")
    missing = built.replace(b'},{"ph":"X"', b'}{"ph":"X"')
    doubled = built.replace(b'},{"ph":"X"', b'},,{"ph":"X"')
    trailing = built.replace(b'],"traceName"', b',],"traceName"')
    assert len({built, missing, doubled, trailing}) == 4
    for content in (missing, doubled, trailing):
        trace = read(content, tmp_path / "a.json", chunk_bytes=chunk_bytes)
        assert len(trace.device) == N_KERNELS
        assert trace.meta["displayTimeUnit"] == "ms"


def test_a_broken_last_event_keeps_the_tail(tmp_path: Path) -> None:
    content = text()
    at = content.rindex(b'"ph": "f"')
    trace = read(content[:at] + b'"ph" "f"' + content[at + 9 :], tmp_path / "a.json")
    assert counts(trace)["syntax_error"] == 1
    assert "truncated" not in counts(trace)
    assert trace.device["start_ns"].min() > 10**18


@pytest.mark.parametrize("garbage", [b"}\0\0garbage", b"\n{}", b'{"traceEvents": []}', b"\n}\n", b"0"])
def test_trailing_garbage_is_ignored(tmp_path: Path, garbage: bytes) -> None:
    trace = read(text() + garbage, tmp_path / "a.json")
    assert trace.complete
    assert counts(trace) == {"trailing_garbage": 1}
    assert len(trace.device) == N_KERNELS
    assert trace.device["start_ns"].min() > 10**18


def test_damaged_metadata_does_not_cost_the_events(tmp_path: Path) -> None:
    content = text().replace(b'"schemaVersion": 1,', b'"schemaVersion": 1, "user": not json, "path": "C:\\Users",')
    trace = read(content, tmp_path / "a.json")
    assert trace.meta["distributedInfo"]["world_size"] == 2
    assert len(trace.device) == N_KERNELS
    assert counts(trace) == {"damaged_metadata": 1}


@pytest.mark.parametrize(("layout", "stride"), [("compact", 1), ("indented", 5)])
def test_cutting_anywhere_loses_nothing_whole(tmp_path: Path, layout: Layout, stride: int) -> None:
    t = TraceBuilder("rocm", rank=None)
    t.op("aten::mm", 1, 30, dims=[[8, 8]])
    t.launch("gemm", 5, 10, 20)
    t.head, t.tail = {"schemaVersion": 1}, {"record_shapes": 1, "deviceProperties": [{"id": 0, "name": "x"}]}
    content, path = t.text(layout).encode(), tmp_path / "a.json"
    ends, position = [], content.index(b'"traceEvents"')
    for event in t.events:
        position = content.index(b"{", position)
        _, position = json.JSONDecoder().raw_decode(content.decode("ascii"), position)
        ends.append((position, event["ph"] == "X"))
    assert sum(is_row for _, is_row in ends) == 3
    for cut in range(0, len(content.rstrip()), stride):
        n_whole = sum(is_row for end, is_row in ends if end <= cut)
        try:
            trace = read(content[:cut], path)
        except UnreadableFile as error:
            assert n_whole == 0, cut
            assert "\n" not in str(error)
            continue
        assert len(trace.host) + len(trace.device) == n_whole, cut
        assert not trace.complete, cut
        assert severity(trace, "truncated") == "error"


def test_a_truncated_file_is_named_with_size_and_byte(tmp_path: Path) -> None:
    content = text()[:-2000]
    trace = read(content, tmp_path / "rank7.json")
    message = next(f.message for f in trace.findings if f.code == "truncated")
    assert "rank7.json" in message
    assert message.count(str(len(content))) == 2


@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_a_cut_gzip_file_gives_what_is_before_the_cut(tmp_path: Path, share: float) -> None:
    packed = gzip.compress(text(n=40), 6)
    trace = read(packed[: int(share * len(packed))], tmp_path / "a.json.gz")
    assert not trace.complete
    assert 0.15 < len(trace.device) / (6 * 40) < 1
    assert "gzip" in next(f.message for f in trace.findings if f.code == "truncated")


def test_a_gzip_file_without_its_checksum_is_whole(tmp_path: Path) -> None:
    trace = read(gzip.compress(text())[:-4], tmp_path / "a.json.gz")
    assert trace.complete
    assert len(trace.device) == N_KERNELS
    assert counts(trace) == {"gzip_tail": 1}


UNREADABLE = {
    "empty": (b"", "empty"),
    "blank": (b"\n \n", "empty"),
    "empty gzip": (gzip.compress(b""), "empty"),
    "head only": (b'{"schemaVersion": 1, "deviceProp', "truncated before its first event"),
    "array only": (b'{"schemaVersion": 1, "traceEvents": [', "truncated before its first whole event"),
    "no events": (b'{"schemaVersion": 1, "traceEvents": []}', "no events"),
    "empty list": (b"[]", "no events"),
    "numbers": (b"[1, 2, 3]", "no events"),
    "execution graph": (b'{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 1, "name": "x"}]}', "execution graph"),
    "other JSON": (b'{"loss": [1, 2]}', "without traceEvents"),
    "events of another kind": (b'{"traceEvents": {"a": 1}}', "without traceEvents"),
    "perfetto": (b"\x0a\x8f\x01\x0a\x05\x00\x00hello\x12\x00", "binary"),
    "sqlite": (b"SQLite format 3\0\x10\x00", "SQLite"),
    "text": (b"Traceback (most recent call last):\n", "no JSON"),
    "a number": (b"17", "without traceEvents"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_file_of_no_use_fails_in_one_clear_line(tmp_path: Path, kind: str) -> None:
    content, words = UNREADABLE[kind]
    with pytest.raises(UnreadableFile) as caught:
        read(content, tmp_path / "bad.pt.trace.json")
    message = str(caught.value)
    assert words in message
    assert "bad.pt.trace.json" in message
    assert "\n" not in message


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="no such file"):
        kineto.read(tmp_path / "gone.json")
    with pytest.raises(UnreadableFile, match="directory"):
        kineto.read(tmp_path)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UnreadableFile, match="no permission"):
        kineto.read(tmp_path / "a.json")


SMALL = text("compact", n=1)
EDIT = st.tuples(st.integers(0, len(SMALL) - 1), st.binary(max_size=6), st.integers(0, 40))
EDITS = st.lists(EDIT, min_size=1, max_size=4)
IN_EVENTS = st.integers(SMALL.index(b'{"ph"') + 1, SMALL.rindex(b'],"traceName"') - 1)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=EDITS, pack=st.booleans(), chunk_bytes=st.sampled_from([97, 1000, 1 << 20]))
def test_whatever_is_broken_nothing_but_unreadable_file_is_raised(
        tmp_path: Path, edits: list[tuple[int, bytes, int]], pack: bool, chunk_bytes: int) -> None:
    content = gzip.compress(SMALL) if pack else SMALL
    for at, inserted, dropped in edits:
        at %= len(content)
        content = content[:at] + inserted + content[at + dropped :]
    try:
        trace = read(content, tmp_path / "a.json", chunk_bytes=chunk_bytes)
    except UnreadableFile as error:
        assert "\n" not in str(error)
        return
    assert (trace.device["end_ns"] >= trace.device["start_ns"]).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=IN_EVENTS, noise=st.binary(min_size=1, max_size=3))
def test_one_broken_place_costs_few_events(tmp_path: Path, at: int, noise: bytes) -> None:
    whole = read(SMALL, tmp_path / "whole.json")
    trace = read(SMALL[:at] + noise + SMALL[at + 1 :], tmp_path / "a.json")
    assert len(whole.host) + len(whole.device) - len(trace.host) - len(trace.device) <= 4


# The public cases


def case(shared: Path, *parts: str) -> Trace:
    return kineto.read(shared.joinpath("cases", *parts))


def check_whole(trace: Trace) -> None:
    assert trace.complete
    assert len(trace.device) == 6


def test_cut_files(shared: Path) -> None:
    check_whole(case(shared, "01_gz_truncated", "run", "rank0.pt.trace.json.gz"))
    cut = {"01_gz_truncated": "rank1.pt.trace.json.gz", "03_json_plain_truncated": "rank0.pt.trace.json"}
    for folder, name in cut.items():
        try:
            trace = case(shared, folder, "run", name)
        except UnreadableFile as error:
            assert "truncated" in str(error)
        else:
            assert not trace.complete
            assert severity(trace, "truncated") == "error"


def test_single_backslashes(shared: Path) -> None:
    trace = case(shared, "05_json_backslash", "run", "rank0.pt.trace.json")
    check_whole(trace)
    assert severity(trace, "escaped_backslash") == "warning"


def test_a_syntax_error(shared: Path) -> None:
    trace = case(shared, "07_json_syntax_error", "run", "rank0.pt.trace.json")
    assert not trace.complete
    message = next(f.message for f in trace.findings if f.code == "syntax_error")
    assert "rank0.pt.trace.json, line 66 column" in message


def test_a_list_of_events(shared: Path) -> None:
    trace = case(shared, "09_top_level_list", "run", "legacy.pt.trace.json")
    assert len(trace.host) == 3
    assert "no_gpu_events" in counts(trace)
    check_whole(case(shared, "09_top_level_list", "run2", "rank0.pt.trace.json"))


def test_equal_keys(shared: Path) -> None:
    trace = case(shared, "11_duplicate_keys", "run", "rank0.pt.trace.json")
    check_whole(trace)
    assert 101 in set(trace.device["correlation"])
    assert "launched_before_capture" not in counts(trace)


def test_untimed_kernels(shared: Path) -> None:
    trace = case(shared, "13_ts_zero_kernels", "run", "rank0.pt.trace.json")
    check_whole(trace)
    assert counts(trace)["kernel_without_time"] == 3
    assert (trace.device["start_ns"].min(), trace.device["end_ns"].max()) == (10_100_000, 11_800_000)


def test_short_kernels(shared: Path) -> None:
    device = case(shared, "15_sub_us_kernels", "run", "rank0.pt.trace.json").device
    assert list(device["end_ns"] - device["start_ns"]) == [200] * 10


def test_a_corrupt_duration(shared: Path) -> None:
    trace = case(shared, "17_corrupt_long_duration", "run", "rank0.pt.trace.json")
    row = trace.device[trace.device["name"] == "fmha_bwd_5"].iloc[0]
    assert (row["start_ns"], row["end_ns"]) == (600_000, 700_000)
    assert (trace.device["raw_end_ns"] - trace.device["start_ns"]).sum() == 1_601_710_000
    assert "fmha_bwd_5" in next(f.message for f in trace.findings if f.code == "kernel_overruns_successor")
    assert trace.device["end_ns"].max() == 2_090_000


def test_lost_streams(shared: Path) -> None:
    trace = case(shared, "27_missing_rank_and_stream", "run", "rank1.pt.trace.json")
    assert len(trace.device) == 4
    assert counts(trace)["launch_without_kernel"] == 2
    message = next(f.message for f in trace.findings if f.code == "no_communication")
    assert "although 2 launches have no kernel" in message
    assert counts(case(shared, "27_missing_rank_and_stream", "run", "rank3.pt.trace.json"))["no_gpu_events"] == 6


def test_graph_replays(shared: Path) -> None:
    for vendor in ("run_amd", "run_nv"):
        trace = case(shared, "31_graph_launch", vendor, "rank0.pt.trace.json")
        assert len(trace.device) == 17
        assert "duplicate_correlation" not in counts(trace)


def test_negative_launch_delays(shared: Path) -> None:
    assert counts(case(shared, "33_negative_launch_delay", "run", "rank0.pt.trace.json"))["kernel_before_launch"] == 4


def test_gpu_events_alone(shared: Path) -> None:
    trace = case(shared, "35_gpu_only", "run", "rank0.pt.trace.json")
    assert len(trace.device) == 6
    assert "no_cpu_events" in counts(trace)


@pytest.mark.parametrize("run", ["run_us", "run_str"])
def test_nanoseconds_since_the_epoch(shared: Path, run: str) -> None:
    device = case(shared, "37_large_ts", run, "rank0.pt.trace.json").device
    assert set(device["end_ns"] - device["start_ns"]) == {880}
    assert set(device["start_ns"].to_numpy()[1:] - device["end_ns"].to_numpy()[:-1]) == {20}
    assert len(device) == 40


MALFORMED: dict[str, set[str]] = {
    "00_good.json": set(),
    "01_truncated_mid_event.json": {"truncated"},
    "03_trailing_garbage.json": {"trailing_garbage"},
    "05_bad_utf8_in_name.json": {"bad_utf8"},
    "07_control_char_in_name.json": {"control_characters"},
    "09_no_profilerstep.json": set(),
    "11_epoch_us_ts.json": {"base_time_ignored"},
    "13_duplicate_correlation.json": {"duplicate_correlation"},
    "17_compact_rank3.json": {"no_communication"},
    "19_uint64_arg.json": set(),
    "21_null_and_empty_events.json": {"ignored_entries"},
    "23_bom.json": set(),
    "25_gz_two_members.json.gz": set(),
    "27_gz_named_json.json": set(),
    "29_kernel_dur_overflows_next.json": {"kernel_overruns_successor"},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_every_kind_of_damage_to_one_trace(shared: Path, name: str) -> None:
    trace = kineto.read(shared / "malformed" / name)
    usual = counts(kineto.read(shared / "malformed" / "00_good.json"))
    assert MALFORMED[name] <= set(counts(trace))
    assert trace.complete == ("truncated" not in MALFORMED[name])
    if trace.complete:
        caused = {"duplicate_correlation", "launch_without_kernel"}
        assert set(counts(trace)) - set(usual) - caused == MALFORMED[name] - caused
        expected = json.loads((shared / "traces" / "oracle.json").read_text())["minitoy_mi250/worker0.pt.trace.json.gz"]
        assert (trace.device["activity"] == "kernel").sum() == expected["n_kernels"]
        total_us = (trace.device["end_ns"].max() - trace.device["start_ns"].min()) / 1000
        assert total_us == pytest.approx(expected["gpus"]["2"]["total"], abs=1)


def test_a_trace_without_events(shared: Path) -> None:
    with pytest.raises(UnreadableFile, match="no events"):
        kineto.read(shared / "malformed" / "15_empty_traceEvents.json")
