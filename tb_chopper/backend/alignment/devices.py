"""Which GPU of a host, as a tool of the host numbers them, is which GPU of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

Sidecars = Mapping[int, Mapping[str, Any]]
"""torch_ext.sidecar by `workers.capture`."""
ADDRESS, ORDER, INDEX = "PCI address", "their order", "the training's device index"


def matched(present: Sequence[int], addresses: Mapping[int, str | None], workers: pd.DataFrame,
            sidecars: Sidecars) -> tuple[dict[int, int], str]:
    """The run's gpu by the tool's number, and how it is known: ADDRESS, else ORDER where there are as many of both,
    else INDEX; nothing and "" where none of these tells.

    present: the tool's numbers; addresses: PCI address by number; workers: WORKERS of one host.
    """
    devices: dict[int, Mapping[str, Any]] = {int(gpu): {} for gpu in workers["gpu"]}
    for gpu, capture in zip(workers["gpu"], workers["capture"], strict=True):
        # Of several captures of a GPU, those without a sidecar say nothing.
        devices[int(gpu)] = sidecars.get(int(capture), {}).get("identity", {}).get("device") or devices[int(gpu)]
    numbers = {address.lower(): number for number, address in addresses.items() if isinstance(address, str)}
    found = {numbers[a]: gpu for gpu, d in devices.items() if (a := str(d.get("pci_address")).lower()) in numbers}
    if devices and len(found) == len(devices):
        return found, ADDRESS
    if len(devices) == len(present):
        return dict(zip(sorted(present), sorted(devices), strict=True)), ORDER
    index = {d.get("index"): gpu for gpu, d in devices.items()}
    if len(index) == len(devices) and all(i in present for i in index):
        return {int(i): gpu for i, gpu in index.items() if i is not None}, INDEX
    return {}, ""
