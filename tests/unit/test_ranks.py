"""Collectives matched across ranks and clocks put on one, on tables written by hand (µs)."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tb_chopper.backend import schema
from tb_chopper.backend.alignment import ranks

ONE_HOST = {0: "a", 1: "a", 2: "a", 3: "a"}


def rows(*each: tuple, **columns: object) -> pd.DataFrame:
    """(gpu, start, end) of communication rows without any metadata; `columns` for all of them."""
    frame = pd.DataFrame(each, columns=["gpu", "start_ns", "end_ns"])
    frame[["start_ns", "end_ns"]] = (frame[["start_ns", "end_ns"]] * 1000).round().astype("int64")
    made = {"group": None, "seq": -1, "name": "all_reduce", "step": 0, "span": 0, **columns}
    return frame.assign(**{k: v if np.ndim(v) else [v] * len(frame) for k, v in made.items()}).astype({"step": "Int64"})


def matched(frame: pd.DataFrame, hosts: dict | None = None) -> list[int]:
    return ranks.match(frame, ONE_HOST if hosts is None else hosts).instance.tolist()


def test_by_sequence_number_whatever_the_order():
    frame = rows((0, 0, 9), (0, 10, 19), (1, 11, 19), (1, 2, 9), seq=[7, 8, 8, 7], group="g")
    assert matched(frame) == [0, 1, 1, 0]


def test_a_sequence_number_belongs_to_its_group():
    assert matched(rows((0, 0, 9), (1, 0, 9), seq=[7, 7], group=["g", "h"])) == [0, 1]


def test_the_kth_of_a_group_and_name_in_a_step():
    frame = rows((0, 0, 9), (0, 10, 19), (0, 20, 29), (1, 1, 9), (1, 12, 19), (1, 21, 29),
                 name=["all_reduce", "all_gather", "all_reduce"] * 2)
    assert matched(frame) == [0, 1, 2] * 2


def test_a_lost_row_does_not_shift_those_behind_it():
    """GPU 1 lost the second of three."""
    frame = rows((0, 0, 9), (0, 10, 19), (0, 20, 29), (1, 1, 9), (1, 21, 29))
    assert matched(frame) == [0, 1, 2, 0, 2]


def test_a_lost_row_in_one_step_leaves_the_other_steps_alone():
    frame = rows((0, 0, 9), (0, 10, 19), (0, 20, 29), (1, 11, 19), (1, 22, 29), step=[0, 0, 1, 0, 1])
    assert matched(frame) == [0, 1, 2, 1, 2]


def test_rows_that_share_no_time_are_never_one_collective():
    frame = rows((0, 0, 9), (0, 10, 19), (1, 30, 39))
    assert len(set(matched(frame))) == 3


def test_of_two_rows_closest_to_one_the_closer_has_it():
    frame = rows((0, 0, 10), (0, 40, 50), (0, 60, 70), (1, 2, 9.5), (1, 3, 9.9))
    instance = matched(frame)
    assert instance[4] == instance[0]
    assert instance[3] not in instance[:3]


def test_what_was_launched_before_the_first_step_goes_by_time():
    """Each rank's capture began at another collective: the k-th of one is not the k-th of the other."""
    frame = rows((0, 0, 9), (0, 10, 19), (1, 11, 19), (1, 20, 29), (0, 40, 49), (1, 40, 49), step=[None] * 4 + [0, 0])
    assert matched(frame) == [0, 1, 1, 2, 3, 3]


def test_halves_of_a_transfer_stand_alone():
    assert matched(rows((0, 0, 9), (1, 0, 9), name=["send", "recv"])) == [0, 1]
    assert matched(rows((0, 0, 9), (1, 0, 9), name="send")) == [0, 1]


def test_halves_that_tell_their_peer_are_one_transfer():
    """Two messages from 0 to 1, one back, one from 1 to 2; sequence numbers count each half for itself."""
    frame = rows((0, 0, 9), (0, 10, 19), (0, 15, 29), (1, 1, 9), (1, 12, 19), (1, 20, 29), (1, 30, 39), (2, 5, 39),
                 name=["send", "send", "recv", "recv", "recv", "send", "send", "recv"],
                 peer=[1, 1, 1, 0, 0, 0, 2, 1], seq=[1, 2, 3, 7, 8, 9, 10, 4], group="pp")
    assert matched(frame) == [0, 2, 3, 0, 2, 3, 1, 1]


def test_messages_tie_hosts_that_share_no_collective():
    """GPU 1's clock is 500 µs ahead; the half that receives ends 3 µs after the one that sends, both ways."""
    each, names, peers = [], [], []
    for k in range(4):
        at = 1000 * k
        each += [(0, at, at + 9), (1, at + 505, at + 512), (1, at + 600, at + 609), (0, at + 100, at + 112)]
        names += ["send", "recv", "send", "recv"]
        peers += [1, 0, 0, 1]
    found = ranks.match(rows(*each, name=names, peer=peers), {0: "a", 1: "b"})
    assert found.clocks["known"].tolist() == [True, True]
    assert found.clocks["offset_us"].tolist() == [0, 500]
    assert found.clocks["residual_us"].tolist() == [0, 3]


def test_a_half_whose_peer_is_not_here_stands_alone():
    frame = rows((0, 0, 9), (0, 10, 19), (1, 10, 19), name=["send", "send", "recv"], peer=[5, 1, 0])
    assert matched(frame) == [0, 1, 1]


def test_several_kernels_of_one_sequence_number_pair_in_order():
    frame = rows((0, 0, 4), (0, 5, 9), (1, 1, 4), (1, 6, 9), seq=3, group="g")
    assert matched(frame) == [0, 1, 0, 1]


def test_nothing_to_match():
    found = ranks.match(rows(), {})
    assert len(found.instance) == len(found.clocks) == 0


@given(st.lists(st.integers(-3_000_000, 3_000_000), min_size=2, max_size=5), st.integers(0, 2**32 - 1))
def test_offsets_of_named_hosts_are_found(offsets_us: list[int], seed: int):
    """Every host has one GPU and a clock of its own; collectives end at once but for 3 µs of noise."""
    random = np.random.default_rng(seed)
    n = 30
    ends = np.cumsum(random.uniform(100, 5000, n))
    parts = [rows(*((gpu, e - random.uniform(1, 90) + off, e + off + random.uniform(-3, 3)) for e in ends))
             for gpu, off in enumerate(offsets_us)]
    frame = pd.concat(parts, ignore_index=True)
    found = ranks.match(frame, {gpu: f"host{gpu}" for gpu in range(len(offsets_us))})
    assert found.instance.tolist() == list(range(n)) * len(offsets_us)
    assert found.clocks["offset_us"].tolist() == pytest.approx([o - offsets_us[0] for o in offsets_us], abs=6)
    assert (found.clocks["residual_us"] <= 12).all()
    shifted = frame["end_ns"] + found.shift_ns
    assert (shifted.groupby(found.instance).agg(lambda e: e.max() - e.min()) <= 18_000).all()


def test_hosts_tied_through_a_third():
    """Host a and c share no collective; b takes part in those of both."""
    ab = [rows((0, t, t + 9), (1, t + 1000, t + 1009), group="ab") for t in (0, 100, 200)]
    bc = [rows((1, t + 1000, t + 1009), (2, t + 3000, t + 3009), group="bc") for t in (50, 150, 250)]
    clocks = ranks.match(pd.concat([*ab, *bc]), {0: "a", 1: "b", 2: "c"}).clocks
    assert clocks["offset_us"].tolist() == [0, 1000, 3000]


def test_a_clock_that_nothing_ties_is_left_as_it_is_and_named():
    frame = pd.concat([rows((0, t, t + 9), (1, t, t + 9)) for t in (0, 20, 40)] +
                      [rows((2, 500, 509), (3, 500, 509), group="other")])
    found = ranks.match(frame, {0: "a", 1: "a", 2: "b", 3: "b"})
    assert found.clocks["known"].tolist() == [True, False]
    assert found.shift_ns.tolist() == [0] * 8
    assert [f.code for f in found.findings] == ["clock_unknown"]


def test_gpus_of_unknown_hosts_share_a_clock_unless_their_ends_are_far_apart():
    together = pd.concat([rows((0, t, t + 9), (1, t, t + 9.05)) for t in (0, 20, 40)])
    assert ranks.match(together, {}).clocks["gpus"].tolist() == [[0, 1]]
    apart = pd.concat([rows((0, t, t + 9), (1, t + 1000, t + 1009)) for t in (0, 20, 40)])
    assert ranks.match(apart, {}).clocks["gpus"].tolist() == [[0], [1]]
    # Ends that scatter as much as they differ say nothing about a clock.
    wild = pd.concat([rows((0, t, t + 9), (1, t, t + 9 + late)) for t, late in ((0, 90), (2000, 900), (4000, 1800))])
    assert ranks.match(wild, {}).clocks["gpus"].tolist() == [[0, 1]]


def test_correction_can_be_switched_off():
    frame = pd.concat([rows((0, t, t + 9), (1, t + 1000, t + 1009)) for t in (0, 20, 40)])
    found = ranks.match(frame, {0: "a", 1: "b"}, correct_clocks=False)
    assert found.shift_ns.tolist() == [0] * 6
    assert found.clocks["offset_us"].tolist() == [0, 1000]
    assert "not corrected" in found.findings[0].message


def workers(*each: dict) -> pd.DataFrame:
    base = {"file": "f", "span": 0, "start_ns": 10**9, "end_ns": 2 * 10**9, "world_size": 2}
    made = [{**base, "capture": i, "rank": i, "gpu": i, **w} for i, w in enumerate(each)]
    return schema.conform(pd.DataFrame(made), schema.WORKERS)


def test_a_second_process_of_a_rank_is_left_out():
    kept, findings = ranks.comparable(workers({}, {}, {"rank": 1, "gpu": 2}))
    assert kept == [0, 1]
    assert findings == []  # the run names it already


def test_ranks_of_another_run_are_left_out_and_named():
    kept, findings = ranks.comparable(workers({}, {}, {"file": "old", "start_ns": 10**9 + 601 * 10**9}))
    assert kept == [0, 1]
    assert [(f.code, "old" in f.message) for f in findings] == [("rank_of_another_run", True)]
    kept, findings = ranks.comparable(workers({}, {}, {"file": "big", "world_size": 64}))
    assert kept == [0, 1]
    assert "2 ranks" in findings[0].message
