"""Schedules of a pipeline: what each rank computes in which order, and where it sends and receives.

GPipe runs all forwards, then all backwards. 1F1B runs as many forwards as there are stages behind, then one forward and
one backward in turn. Interleaved 1F1B does so with several stages per rank, whose microbatches take turns in rounds.
Orders are those of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

GPIPE, ONE_F_ONE_B, INTERLEAVED = "gpipe", "1f1b", "interleaved"
CLASSES = {GPIPE: "ScheduleGPipe", ONE_F_ONE_B: "Schedule1F1B", INTERLEAVED: "ScheduleInterleaved1F1B"}
"""Names of the schedules in torch.distributed.pipelining."""
FORWARD, BACKWARD = "F", "B"


class Action(NamedTuple):
    kind: str
    """F, B; SEND_F, RECV_F, SEND_B, RECV_B"""
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """As torch.distributed.pipelining writes it: 2F5, 2SEND_F5."""
        return f"{self.stage}{self.kind}{self.microbatch}"


def order(schedule: str, ranks: int, virtual: int, microbatches: int, rank: int) -> list[Action]:
    """What a rank computes, in order. It holds the stages rank, rank + ranks, ..."""
    total = microbatches * virtual
    if schedule == GPIPE:
        return [Action(kind, rank, k) for kind in (FORWARD, BACKWARD) for k in range(microbatches)]
    interleaved = schedule == INTERLEAVED
    in_round = microbatches // max(1, microbatches // ranks) if interleaved else microbatches

    def action(kind: str, k: int) -> Action:
        turn, place = divmod(k, in_round)
        chunk = turn % virtual if kind == FORWARD else virtual - 1 - turn % virtual
        return Action(kind, chunk * ranks + rank, turn // virtual * in_round + place)

    warm_up = min(total, (virtual - 1) * in_round + (2 if interleaved else 1) * (ranks - 1 - rank))
    done = [action(FORWARD, k) for k in range(warm_up)]
    for k in range(total - warm_up):
        done += [action(FORWARD, warm_up + k), action(BACKWARD, k)]
    return done + [action(BACKWARD, k) for k in range(total - warm_up, total)]


def with_messages(orders: Sequence[Sequence[Action]], n_stages: int) -> list[list[Action]]:
    """The orders of all ranks with their messages: sent right after what makes them, received at the place in the
    receiver's order that it has reached by then, so ahead of the use.

    Raises ValueError for orders of which one waits for another for ever.
    """
    ranks = len(orders)
    waiting = [deque(actions) for actions in orders]
    out: list[list[Action]] = [[] for _ in orders]
    done: set[Action] = set()
    while any(waiting):
        before = len(done)
        for rank, queue in enumerate(waiting):
            if not queue or not _needs(queue[0], n_stages) <= done:
                continue
            action = queue.popleft()
            done.add(action)
            out[rank].append(action)
            kind, stage, microbatch = action
            target = stage + (1 if kind == FORWARD else -1)
            if 0 <= target < n_stages and target % ranks != rank:
                out[rank].append(Action(f"SEND_{kind}", stage, microbatch))
                out[target % ranks].append(Action(f"RECV_{kind}", target, microbatch))
        if len(done) == before:
            raise ValueError("the orders of a pipeline's ranks wait for each other")
    return out


def _needs(action: Action, n_stages: int) -> set[Action]:
    kind, stage, microbatch = action
    if kind == FORWARD:
        return {Action(FORWARD, stage - 1, microbatch)} if stage else set()
    last = stage == n_stages - 1
    return {Action(FORWARD, stage, microbatch) if last else Action(BACKWARD, stage + 1, microbatch)}


def bubble(ranks: int, virtual: int, microbatches: int) -> float:
    """Idle share of a pipeline of equal stages whose messages cost nothing: (p - 1) / (v m + p - 1); v = 1 for GPipe
    and 1F1B. (Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 2.2)"""
    return (ranks - 1) / (virtual * microbatches + ranks - 1)
