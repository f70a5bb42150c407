"""TorchScript: how hot code runs without Python's interpreter lock.

A serving stub has threads that read, load and answer beside the computing thread. Each operation of torch releases the lock and
must take it again, after other threads' work. Two hundred operations a layer made a busy server's layer take two to four times
as long as alone. TorchScript runs a whole function under one release of the lock. It is deprecated, but its successor needs a
C++ compiler on the server's machine.

Scripted are upper layers (`run_layers`), lower layers (`hplm.engine.windows.run_windows`), adapters (`adapt`), attention
(`attention`) and filling adapter slots (`hplm.engine.slot_fill`). These modules have no `from __future__ import annotations`,
because TorchScript reads the types of attributes, not their names.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def scripted(code: nn.Module | Callable[..., object]) -> Any:
    """Compile a module or function to TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(code)
