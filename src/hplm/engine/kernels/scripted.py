"""How code that threads share runs without Python's interpreter lock: as TorchScript.

A serving stub has threads that read, load and answer beside the one that computes. Each operation of torch lets go of the
lock and has to get it back, behind whatever another thread is doing: two hundred operations a layer made a busy server's
layer take two to four times as long as alone. TorchScript runs a whole function under one release of the lock. It is
deprecated, but what replaces it wants a C++ compiler where the server runs.

`run_layers` has the upper layers, `run_windows` the lower ones, `adapt` the adapters, `attend` attention that all rows share,
`slot_fill` how slots are filled. What is scripted has no `from __future__ import annotations`: TorchScript reads the types of
attributes, not their names.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def scripted(code: nn.Module | Callable[..., object]) -> Any:
    """The module or function in TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(code)
