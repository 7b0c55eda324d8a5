"""The clock of what a rank computes, by events of a GPU."""

import torch

from shardwise.engine.busy import BusyClock


def test_events_time_a_phase_without_what_it_waits_for(device):
    """The host is done long before the device; three times the work in a wait leaves the phase as it is."""
    matrix = torch.randn(4096, 4096, device=device)

    def work(num_times):
        for _ in range(num_times):
            torch.mm(matrix, matrix)

    work(150)  # the device's own clock rises with work
    torch.cuda.synchronize()
    clock = BusyClock(device)
    with clock.phase("forward"):
        work(50)
    alone = clock.take()["train/busy/forward/rank_0"].result()
    with clock.phase("forward"):
        work(50)
        with clock.waiting():
            work(150)
    assert abs(clock.take()["train/busy/forward/rank_0"].result() / alone - 1) < 0.5
    assert alone > 1e-4
