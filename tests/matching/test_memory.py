"""Memory does not grow with n * m times the batch: peak resident size of a process of its own, forward and backward."""

import json
import os
import subprocess
import sys

import pytest

N, PROBLEMS = 4096, 4
MATRIX_MB = N * N * PROBLEMS * 4 / 2**20  # 256: every pair of every problem, once, in single precision
ALLOWED_MB = 160

SCRIPT = f"""
import json, resource, torch
from alignattn.functional import conditional_transport, mmd, neighbourhood_transport, optimal_transport

def ring(q):
    # every node beside the next eight
    nodes = torch.arange(2 * q.shape[2]).repeat(8)
    first = nodes // q.shape[2] * q.shape[2]
    return nodes, first + (nodes - first + torch.arange(8).repeat_interleave(len(nodes) // 8)) % q.shape[2]

losses = {{
    "transport-cosine": lambda q, k: optimal_transport(q, k, max_iterations=1).cost,
    "transport-sqeuclidean": lambda q, k: optimal_transport(
        q, k, cost="sqeuclidean", relative_epsilon=True, max_iterations=1
    ).cost,
    "conditional": lambda q, k: conditional_transport(q, k, q, k),
    "neighbourhoods": lambda q, k: neighbourhood_transport(q, k, q, k, ring(q)),
    "mmd": lambda q, k: mmd(q, k),
}}

def run(loss, n):
    q, k = (torch.randn(2, {PROBLEMS // 2}, n, 16).requires_grad_() for _ in range(2))
    loss(q, k).sum().backward()

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

for loss in losses.values():
    run(loss, 8)  # lazy imports, thread pools
used = {{}}
start = peak()
for name, loss in losses.items():
    run(loss, {N})
    used[name] = peak() - start
print(json.dumps(used))
"""


@pytest.fixture(scope="module")
def used_mb():
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["transport-cosine", "transport-sqeuclidean", "conditional", "neighbourhoods", "mmd"])
def test_memory_stays_far_below_the_matrix(used_mb, name):
    assert used_mb[name] < ALLOWED_MB < MATRIX_MB, f"peak after each: {used_mb} MB"
