"""The upper stage: hidden states of many tenants' texts -> logits, shared layers once, each text's own adapter and head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hplm.adapters.tenant import Tenant
from hplm.config import BaseConfig
from hplm.nn.adapters import AdapterSlots
from hplm.nn.dtype import computing_in
from hplm.nn.encoder import UpperEncoder


@dataclass(frozen=True)
class UpperRequest:
    """One text after the look-up: `hidden` `[T, H]`."""

    tenant: Tenant
    hidden: npt.NDArray[np.float16] | npt.NDArray[np.float32]


def in_dtype(upper: UpperEncoder, dtype: torch.dtype) -> UpperEncoder:
    """Matrices in `dtype`, LayerNorm and the residual stream in fp32."""
    for module in upper.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
    return upper.eval()


class UpperEngine:
    """Runs packed batches over one set of upper layers. Not thread-safe: one batch at a time."""

    def __init__(
        self,
        config: BaseConfig,
        upper: UpperEncoder,
        *,
        num_slots: int,
        reduced_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.slots = AdapterSlots(config, num_slots, reduced_size, device, dtype)
        self._upper = in_dtype(upper, dtype).to(device)

    def run(self, requests: Sequence[UpperRequest]) -> list[npt.NDArray[np.float32]]:
        """Logits of each request, in order: `[1, labels]` of a classification, `[T, labels]` of a tagging."""
        logits: list[npt.NDArray[np.float32] | None] = [None] * len(requests)
        for part in self._parts(requests):
            for index, answer in zip(part, self._run_part([requests[i] for i in part]), strict=True):
                logits[index] = answer
        return [answer for answer in logits if answer is not None]

    def _parts(self, requests: Sequence[UpperRequest]) -> Iterator[list[int]]:
        """Positions sorted by tenant and length, cut where the slots are used up."""
        order = sorted(range(len(requests)), key=lambda i: (requests[i].tenant.card.name, len(requests[i].hidden)))
        part: list[int] = []
        tenants: set[str] = set()
        for index in order:
            name = requests[index].tenant.card.name
            if name not in tenants and len(tenants) == self.slots.table.num_slots - 1:
                yield part
                part, tenants = [], set()
            part.append(index)
            tenants.add(name)
        if part:
            yield part

    def _run_part(self, requests: list[UpperRequest]) -> list[npt.NDArray[np.float32]]:
        lengths = [len(request.hidden) for request in requests]
        slots: list[int] = []
        try:
            for request in requests:
                slots.append(self.slots.assign(request.tenant))
            packed = np.concatenate([request.hidden for request in requests]).astype(np.float32)
            adapt = self.slots.batched(slots, lengths)
            with torch.inference_mode(), computing_in(self.dtype, self.device):
                hidden = self._upper(torch.from_numpy(packed).to(self.device), lengths, adapt)
            parts = hidden.float().cpu().split(lengths)
            return [head_logits(r.tenant, part).numpy() for r, part in zip(requests, parts, strict=True)]
        finally:
            for request in requests[: len(slots)]:
                self.slots.release(request.tenant)


def head_logits(tenant: Tenant, hidden: Tensor) -> Tensor:
    """A tenant's head over the last hidden states `[T, H]` of one text: `[1, labels]` or `[T, labels]`."""
    weight, bias = torch.from_numpy(tenant.head.weight), torch.from_numpy(tenant.head.bias)
    return pool(tenant.card.task, tenant.card.pooling, hidden) @ weight.T + bias


def pool(task: str, pooling: str, hidden: Tensor) -> Tensor:
    """What the head sees: every token for a tagging; `[CLS]` or the mean of the tokens for a classification."""
    if task == "tagging":
        return hidden
    return hidden[:1] if pooling == "cls" else hidden.mean(0, keepdim=True)
