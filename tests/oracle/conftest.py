"""What several oracle tests look at: simulated once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tb_chopper.backend.simulate import Options, simulate


@pytest.fixture(scope="session")
def simulated_node(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A whole node, 8 GPUs at batch 2 and sequence 4096, by FSDP version; 14 of its 32 layers."""
    options = (Options("mi300x-llama3-8b", shape="b2s4", fsdp=v, layers=14, steps=2, optimizer_every=2) for v in (1, 2))
    return {v: simulate(tmp_path_factory.mktemp("node"), o)[0] for v, o in zip((1, 2), options, strict=True)}
