"""What parallelism exchanges inside layers, on tables written by hand (µs)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.metrics import collectives
from tb_chopper.backend.metrics.exchanges import exchanges
from tb_chopper.backend.metrics.process_groups import process_groups
from tests.unit import tables
from tests.unit.test_collectives import collective, kernel

TP = {"group": "2", "group_desc": "mesh_tp"}
LINK = 400e9


def found(rows: list[dict], by: Any = ("role", "layer"), where: Any = None, link: float | None = LINK) -> pd.DataFrame:
    kernels = tables.kernels(rows)
    gpus = sorted({r["gpu"] for r in rows})
    arrived = collectives.arrivals(kernels, dict.fromkeys(gpus, "a"))[0]
    groups = process_groups(arrived)
    each = collectives.collectives(arrived, roles=dict(zip(groups["group"], groups["role"], strict=True)),
                                   link_bytes_per_s=link)
    steps = tables.steps(*[(s, 0, 1000) for s in sorted({r["step"] for r in rows})])
    return exchanges(arrived, each, kernels, steps, by, where)


ZERO, ONE = {"layer": "layers.0"}, {"layer": "layers.1"}
LAYERS = [
    kernel(0, 0, 100, **ZERO), collective(0, 100, 140, **TP, **ZERO, group_seq=1),
    kernel(1, 0, 110, **ZERO), collective(1, 110, 140, **TP, **ZERO, group_seq=1),
    kernel(0, 150, 250, **ONE), collective(0, 250, 280, **TP, **ONE, group_seq=2), kernel(0, 260, 270, **ONE),
    kernel(1, 150, 250, **ONE), collective(1, 250, 280, **TP, **ONE, group_seq=2),
]
"""Layer 0: GPU 1 computes 10 longer, GPU 0 waits for it. Layer 1 begins 10 late; GPU 0 computes under a third of it."""


def test_share_of_the_layer():
    out = found(LAYERS)
    assert out["role"].tolist() == ["tensor", "tensor"]
    assert out["layer"].tolist() == ["layers.0", "layers.1"]
    assert out["n"].tolist() == [1, 1]
    assert out["n_per_step"].tolist() == [1, 1]
    assert out["duration_us"].tolist() == [40 + 30, 30 + 30]
    assert out["median_us"].tolist() == [35, 30]
    assert out["elapsed_us"].tolist() == [140 + 140, (110 + 20 + 10) + (100 + 30 + 10)]
    assert out["exposed_us"].tolist() == [70, 50]
    assert out["exposed_wait_us"].tolist() == [10, 0]
    assert out["exposed_share"].tolist() == pytest.approx([1, 50 / 60])
    assert out["share"].tolist() == pytest.approx([70 / 280, 50 / 280])
    assert out["transfer_share"].tolist() == pytest.approx([60 / 280, 50 / 280])


def test_bandwidth_leaves_small_messages_out():
    """10 MB in 30 µs over two ranks; one of 8 bytes says nothing of the links."""
    small = [collective(g, 300, 310, **TP, **ONE, group_seq=3, in_nelems=4) for g in (0, 1)]
    out = found([*LAYERS, *small])
    assert out["bytes"].tolist() == [10_000_000, 10_000_008]
    assert out["busbw_gbs"].tolist() == pytest.approx([1000 / 3, 1000 / 3])
    assert out["link_share"].tolist() == pytest.approx([1000 / 3 / 400] * 2)
    unknown = found([*LAYERS, *small], link=None)
    assert unknown["link_share"].isna().all()
    assert unknown["busbw_gbs"].tolist()[0] == pytest.approx(1000 / 3)


def test_cut_otherwise():
    by_gpu = found(LAYERS, ["role", "gpu"])
    assert by_gpu["exposed_us"].tolist() == [60, 60]
    assert by_gpu["elapsed_us"].tolist() == [280, 280]  # of the capture: a GPU has a window
    whole = found(LAYERS, "role")
    assert whole["n"].tolist() == [2]
    assert whole["share"].tolist() == pytest.approx([120 / 560])
    one = found(LAYERS, where={"layer": "layers.1"})
    assert one["elapsed_us"].tolist() == [280]
    with pytest.raises(InvalidSelection, match="'operation'"):
        found(LAYERS, "operation")


def test_steps():
    later = [{**r, "start": r["start"] + 1000, "end": r["end"] + 1000, "step": 1,
              **({"group_seq": r["group_seq"] + 10} if r.get("kind") == "communication" else {})} for r in LAYERS]
    both = found([*LAYERS, *later])
    assert both["n"].tolist() == [2, 2]
    assert both["n_per_step"].tolist() == [1, 1]
    assert found([*LAYERS, *later], ["role", "step"])["n_per_step"].tolist() == [2, 2]
    assert found([*LAYERS, *later], where={"step": 1})["exposed_us"].tolist() == [70, 50]


def test_only_gpus_that_take_part_count():
    """A third GPU has the same layer and no exchange."""
    other = kernel(2, 0, 500, **ZERO)
    assert found([*LAYERS, other])["elapsed_us"].tolist() == [280, 280]


def test_one_rank_alone_does_not_know_its_waits():
    out = found([r for r in LAYERS if r["gpu"] == 0])
    assert out["exposed_us"].tolist() == [40, 20]
    assert out["exposed_wait_us"].isna().all()
    assert out["transfer_share"].isna().all()
    assert out["share"].tolist() == pytest.approx([40 / 140, 20 / 140])


def test_imbalance_of_tokens():
    """Of 200 elements on average one rank receives 300."""
    rows = [collective(g, 0, 50, group="3", group_desc="mesh_ep", group_size=3, collective="all_to_all", in_nelems=200,
                       out_nelems=n, layer="layers.0") for g, n in enumerate((100, 200, 300))]
    out = found(rows)
    assert out["role"].tolist() == ["expert"]
    assert out["imbalance"].tolist() == [1.5]
    rows[1]["out_nelems"] = -1  # one rank's part is not told
    assert found(rows)["imbalance"].isna().all()
    assert found(LAYERS)["imbalance"].isna().all()


BARE = {"collective": None, "group": None, "group_desc": None, "group_size": -1, "group_seq": -1, "dtype": None,
        "in_nelems": -1, "out_nelems": -1}


@pytest.mark.parametrize("name, collective_", [
    ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", "dispatch"),
    ("void deep_ep::internode::combine<false, 8, __nv_bfloat16, 8, 2, 16, 2>(int4*)", "combine"),
    ("void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)", "dispatch"),
    ("void deep_ep::intranode::notify_dispatch<8>(int const*)", "notify"),
    ("void deep_ep::layout::get_dispatch_layout<256, 4, 8>(long const*)", "layout"),
])
def test_kernels_of_deep_ep(name: str, collective_: str):
    """They tell nothing, and are expert parallelism all the same; other kernels without metadata are not."""
    rows = [{**collective(g, 10 * g, 50), **BARE, "name": name} for g in (0, 1)]
    rows += [{**collective(g, 100, 150), **BARE, "name": "ncclDevKernel_SendRecv(ncclDevComm*)"} for g in (0, 1)]
    out = found(rows, ("role", "group", "name")).set_index("group")
    assert out.loc["DeepEP", ["role", "name", "n"]].tolist() == ["expert", collective_, 1]
    assert out.loc["DeepEP", "exposed_wait_us"] == 10
    assert out.loc["unnamed group", "role"] != "expert"


def test_nothing_exchanged():
    rows = [kernel(0, 0, 100)]
    assert len(found(rows)) == 0
    assert not np.isin("tensor", found(LAYERS, where={"role": "expert"})["role"])
