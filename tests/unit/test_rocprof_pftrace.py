"""rocprofv3's own Perfetto traces, built here as its writer fills them in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.readers import counter_files, rocprof_pftrace

pb = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
T0 = 1_764_400_000_123_456_789  # a double would round it


class Builder:
    """Slices in one packet sequence, names and annotation keys interned as the SDK does it."""

    def __init__(self) -> None:
        self.trace = pb.Trace()
        self.iids: dict[tuple[str, str], int] = {}
        self.first = True

    def _intern(self, packet: Any, kind: str, text: str) -> int:
        known = (kind, text) in self.iids
        iid = self.iids.setdefault((kind, text), len(self.iids) + 1)
        if not known:
            getattr(packet.interned_data, kind).add(iid=iid, name=text)
        return iid

    def slice(self, name: str, start: int, end: int, **annotations: Any) -> None:
        packet = self.trace.packet.add()
        packet.timestamp, packet.trusted_packet_sequence_id = start, 7
        packet.sequence_flags = 1 if self.first else 2
        self.first = False
        event = packet.track_event
        event.type, event.track_uuid = 1, 99
        event.name_iid = self._intern(packet, "event_names", name)
        for key, value in annotations.items():
            made = event.debug_annotations.add(name_iid=self._intern(packet, "debug_annotation_names", key))
            if isinstance(value, str):
                made.string_value = value
            elif isinstance(value, float):
                made.double_value = value
            else:
                made.uint_value = value
        end_packet = self.trace.packet.add()
        end_packet.timestamp, end_packet.trusted_packet_sequence_id, end_packet.sequence_flags = end, 7, 2
        end_packet.track_event.type, end_packet.track_event.track_uuid = 2, 99

    def dispatch(self, name: str, start: int, end: int, corr: int, **counters: float) -> None:
        self.slice(name, start, end, begin_ns=start, end_ns=end, delta_ns=end - start, kind=11, agent="Agent-2",
                   agent_type="GPU", corr_id=corr, queue=3, tid=4711, kernel_id=5, private_segment_size=0,
                   group_segment_size=512, workgroup_size=256, grid_size=65536, **counters)

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.trace.SerializeToString())
        return path


def built() -> Builder:
    b = Builder()
    b.slice("hipLaunchKernel", T0, T0 + 5, begin_ns=T0, end_ns=T0 + 5, delta_ns=5, tid=4711, kind=8, operation=1,
            corr_id=1)
    b.dispatch("void gemm<float>(float*)", T0 + 10, T0 + 1010, 1, SQ_WAVES=128.0, GRBM_COUNT=2e6)
    b.dispatch('核 "quoted"', T0 + 2010, T0 + 2011, 2)
    b.slice("MEMORY_COPY_HOST_TO_DEVICE", T0 + 3000, T0 + 3100, begin_ns=T0 + 3000, end_ns=T0 + 3100, copy_bytes=64)
    return b


def test_dispatches_are_read_and_nothing_else(tmp_path: Path) -> None:
    found = rocprof_pftrace.read(built().write(tmp_path / "pass_2" / "node0" / "r3_4711_results.pftrace"))
    rows = found.counters
    assert rows["name"].tolist() == ["void gemm<float>(float*)", '核 "quoted"']
    assert rows["start_ns"].tolist() == [T0 + 10, T0 + 2010] and rows["end_ns"].tolist() == [T0 + 1010, T0 + 2011]
    assert rows["dispatch"].tolist() == [1, 2] and set(rows["agent"]) == {"Agent 2"} and set(rows["queue"]) == {3}
    assert set(rows["grid"]) == {65536} and set(rows["workgroup"]) == {256}
    assert rows["SQ_WAVES"].tolist()[0] == 128 and rows["SQ_WAVES"].isna().tolist() == [False, True]
    place = rows[["pass", "rank", "process", "host"]].iloc[0].tolist()
    assert place == [2, 3, 4711, "node0"]
    assert found.complete and not found.findings


def test_a_sequence_that_starts_anew_forgets_its_texts(tmp_path: Path) -> None:
    b = built()
    second = Builder()
    second.dispatch("other", T0 + 5000, T0 + 5100, 3)
    b.trace.packet.extend(second.trace.packet)
    rows = rocprof_pftrace.read(b.write(tmp_path / "a.pftrace")).counters
    assert rows["name"].tolist()[-1] == "other" and rows["grid"].tolist()[-1] == 65536


@pytest.mark.parametrize("lost", [1, 40, 200])
def test_a_cut_file_gives_what_is_whole(tmp_path: Path, lost: int) -> None:
    path = built().write(tmp_path / "a.pftrace")
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost])
    found = rocprof_pftrace.read(path)
    assert not found.complete and [f.code for f in found.findings] == ["file_cut"]
    assert found.counters["name"].tolist() == ["void gemm<float>(float*)", '核 "quoted"'][: len(found.counters)]


@pytest.mark.parametrize("content", [b"", b"{}", b"\x0a", b"\x0a\xff\xff\xff\xff\x7f", b"\x0a\x03abc"])
def test_what_is_no_trace_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pftrace").write_bytes(content)
    with pytest.raises(UnreadableFile) as error:
        rocprof_pftrace.read(tmp_path / "a.pftrace")
    assert "\n" not in str(error.value) and "a.pftrace" in str(error.value)


def test_the_folder_of_counters_takes_it_in(tmp_path: Path) -> None:
    built().write(tmp_path / "pass_1" / "node0" / "4711_results.pftrace")
    found = counter_files.read(tmp_path)
    assert found.counters["SQ_WAVES"].tolist()[0] == 128 and not [f for f in found.findings if f.severity == "error"]


def test_the_same_dispatches_in_two_formats_count_once(tmp_path: Path) -> None:
    folder = tmp_path / "pass_1" / "node0"
    built().write(folder / "4711_results.pftrace")
    (folder / "4711_counter_collection.csv").write_text(
        "Correlation_Id,Dispatch_Id,Agent_Id,Queue_Id,Process_Id,Grid_Size,Kernel_Name,Workgroup_Size,Counter_Name,"
        "Counter_Value,Start_Timestamp,End_Timestamp\n"
        f"1,1,2,3,4711,65536,gemm,256,SQ_WAVES,128,{T0 + 10},{T0 + 1010}\n")
    assert counter_files.read(tmp_path).counters["name"].tolist() == ["gemm"]


def test_a_trace_without_dispatches_is_an_empty_table(tmp_path: Path) -> None:
    b = Builder()
    b.slice("hipMalloc", T0, T0 + 5, begin_ns=T0)
    assert len(rocprof_pftrace.read(b.write(tmp_path / "a.pftrace")).counters) == 0
