"""How a row got its place: the values of `attributed_by`. In words: docs/attribution.md."""

from __future__ import annotations

CONTAINMENT = "launch containment"
ANNOTATION = "annotation"
MODULE = "module scope"
FSDP2_SCOPE = "fsdp2 scope"
BRACKET = "fsdp2 bracket"
FSDP1 = "fsdp1 forward"
SEQUENCE = "sequence number"
NEIGHBOUR = "neighbour"
GRAPH = "graph replay"
EXTERNAL_ID = "external id"
ISSUE_ORDER = "issue order"
LAUNCH_ONLY = "launch call only"
TIME = "time"
BEFORE = "no launch in capture"
NOTHING = "nothing"
