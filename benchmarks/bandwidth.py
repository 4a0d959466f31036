"""Memory read bandwidth of this machine, measured the way a decode step reads weights.

A decode step reads every weight once. The bound on its speed is therefore
(bytes of weights) / (read bandwidth). Each thread takes the dot product of its share of a
buffer far larger than the caches with itself, which reads every byte once.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def read_bandwidth(num_bytes: int = 1 << 29, repeats: int = 5) -> float:
    """Best of `repeats` passes over `num_bytes` with one thread a core, bytes/s."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = np.array_split(np.ones(num_bytes // 4, np.float32), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(lambda share: float(share @ share), shares))
            best = max(best, num_bytes / (time.perf_counter() - start))
    return best
