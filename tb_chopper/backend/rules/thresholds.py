"""From where on a rule speaks. One place for all rules: docs/diagnosis.md lists them with their reasons."""

from __future__ import annotations

LARGE_GAIN = 0.05
"""of a step: a diagnosis that would gain so much is a warning"""
SMALL_GAIN = 0.01
"""of a step: less is not worth a diagnosis"""
EXPLAINED = 0.5
"""of the gain of a diagnosis: where others that name its causes have so much, it is silent"""

UTILIZATION = 0.70
"""share of a step in which a GPU runs something: below it is idle for too long (reference value of the field)"""
EXPOSED_COMMUNICATION = 0.15
"""of a step, waiting for late ranks left out: above it communication bounds the step"""
GRADIENT_BARRIER = 0.03
"""of a step between backward and optimizer"""
LOST_TO_CLOCK = 0.05
"""of a step"""
AT_POWER_CAP = 0.95
"""of the power cap: the clock is held down by it"""
LINK_SLOW, LINK_REACHES = 0.40, 0.70
"""of the link's peak: below the first, large messages are slow; the second is what well-tuned rings reach"""
MANY_MESSAGES, SMALL_MESSAGES = 20, 0.03
"""collectives of a step that are bound by latency, and what they must cost of it"""
ISLANDS_SLOW, ISLANDS_SHARE = 0.40, 0.30
"""of the bandwidth inside an island, of the step: a group over several islands below the first, or whose exposed
transfer is above the second, is worth a change of its shape (reference values of the field)"""
PIPELINE_BUBBLE, PIPELINE_EXCESS, PIPELINE_LATE = 0.10, 0.03, 0.05
"""of a step: the bubble of a pipeline below the first is usual; what unequal stages, and late messages, add to it"""
PIPELINE_UNEQUAL = 0.05
"""time of the slowest stage above the mean: less than a layer, which could not be moved"""

MEMORY_FULL = 0.90
"""of the device at the peak of allocated memory: the next longer sequence may fail (reference value of the field)"""
MEMORY_UNEVEN, MEMORY_UNEVEN_OF_DEVICE = 1.10, 0.05
"""peak over the median of the GPUs, and by how much of the device: less changes no batch size"""
TENSOR_SHARE, TENSOR_LINK = 0.20, 0.50
"""exposed transfer of the layers' time, bandwidth across hosts of the links' peak: tensor parallelism beyond the first,
or below the second, is over-sharded (reference values of the field)"""

BUSY, LOW_MFU, LOW_SM = 0.90, 0.30, 0.60
"""GPU utilization above which a low MFU, or few SMs with work, is a matter of the kernels (reference values of the
field)"""
COVERED = 0.50
"""of the time of kernels: an estimate that knows less of it says nothing about the whole"""
LOW_PRECISION = 0.03
"""of a step that fp32 products would be shorter in bf16"""
SHORT_KERNELS, STORM = 0.50, 0.05
"""of the kernels of a step below 10 µs, of a step that the GPU waits for the launches of these: a launch storm"""
LAUNCH_NS = 100_000
"""a longer gap before a kernel is not its launch: the host did something else"""
FUSION = 0.05
"""of a step that fused kernels would save"""
GRAPH_BREAKS = 0.02
"""of a step that the GPU is idle in graph breaks"""
