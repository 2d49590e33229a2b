"""A pytest plugin that runs the tests of the Triton kernels on a GPU: what they make is made there.

``make test-gpu``. The kernels are compiled, not interpreted; the tests are those of every CPU.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from hypothesis import settings

os.environ.pop("TRITON_INTERPRET", None)  # before a kernel is imported
torch.set_default_device("cuda")
torch.Generator = partial(torch.Generator, "cuda")  # type: ignore[misc, assignment]
settings.register_profile("gpu", max_examples=100, deadline=None)
settings.load_profile("gpu")
