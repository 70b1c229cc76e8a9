"""One colour per thing, everywhere: figures, key figures and tables take their colours from here alone.

Okabe-Ito and the IBM palette, both made for colour-blind readers; every colour keeps a contrast of 3:1 or more against
the light and the dark background, or stands beside a label.
"""

from __future__ import annotations

COLORS: dict[str, str] = {
    # what the GPU does
    "compute": "#4477AA",
    "gemm": "#0072B2",
    "attention": "#56B4E9",
    "vector": "#009E73",
    "communication": "#D55E00",
    "hidden_communication": "#EBAF8A",
    "memcpy": "#E69F00",
    "idle": "#9AA0A8",
    # the phases of a step
    "forward": "#D41159",
    "backward": "#1A85FF",
    "optimizer": "#7B5EA7",
    "other": "#8A8F98",
    # the launch of a kernel
    "prep": "#66C2A5",
    "call": "#FC8D62",
    "under_communication": "#D55E00",
    "graph": "#7570B3",
    "unattributed": "#757D89",
    # from the theoretical to the actual duration
    "theoretical": "#648FFF",
    "instruction": "#785EF0",
    "utilization": "#DC267F",
    "overlap": "#FE6100",
    "frequency": "#FFB000",
    # what the sensors say
    "memory_clock": "#4D9A6A",
    "power": "#B8559B",
    "temperature": "#D8483E",
    "throttle": "#A8743C",
    # waiting for other GPUs
    "waiting": "#882255",
    # memory
    "allocated": "#4477AA",
    "reserved": "#BBBBBB",
    # what the host did while the GPU was idle
    "dispatch": "#66C2A5",
    "device": "#FC8D62",
    "sync": "#7570B3",
    "loader": "#E6C229",
    "allocation": "#C2185B",
    "compile": "#5C3A1E",
    "recompile": "#5C3A1E",
    "gc": "#1F4FD8",
    "unknown": "#757D89",
    # the host's cores
    "active_cores": "#1F95A6",
    "needed_cores": "#CC6677",
    "siblings": "#6F63C9",
    "threads": "#8F8F2B",
}

LABELS: dict[str, str] = {
    "compute": "Compute",
    "gemm": "GEMM",
    "attention": "Attention",
    "vector": "Vector",
    "communication": "Exposed communication",
    "hidden_communication": "Hidden communication",
    "memcpy": "Exposed copies",
    "idle": "Idle",
    "forward": "Forward",
    "backward": "Backward",
    "optimizer": "Optimizer",
    "other": "Other",
    "prep": "Preparation",
    "call": "Call",
    "under_communication": "Call under communication",
    "graph": "Graph replay",
    "unattributed": "Unattributed",
    "theoretical": "Theoretical",
    "instruction": "Instruction",
    "utilization": "Utilization",
    "overlap": "Overlap",
    "frequency": "Frequency",
    "memory_clock": "Memory clock",
    "power": "Power",
    "temperature": "Temperature",
    "throttle": "Throttled",
    "waiting": "Exposed waiting",
    "allocated": "Allocated",
    "reserved": "Reserved",
    "dispatch": "Dispatch",
    "device": "Launched, not started",
    "sync": "Waiting for the device",
    "loader": "Data loading",
    "allocation": "Driver memory",
    "compile": "Compilation",
    "recompile": "Recompilation",
    "gc": "Garbage collection",
    "unknown": "Launch unknown",
    "active_cores": "Active",
    "needed_cores": "Needed at least",
    "siblings": "Both siblings busy",
    "threads": "Threads of the training",
}

COMPARED_PATTERN = "/"
"""The run compared with keeps the colours and is hatched."""
