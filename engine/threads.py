"""Threads of torch on a CPU: some builds take one for each core of the machine, though the process may not run on all."""

import os


def use_all_cores() -> None:
    """Give torch a thread for each core that this process may use, unless the environment says how many."""
    import torch

    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        torch.set_num_threads(usable_cores())


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1
