"""The engine of the encode stage: hidden states of many tenants' texts -> logits, by shared layers, adapters and heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.adapters.packed import Place
from hplm.adapters.slots import IDENTITY
from hplm.adapters.tenant import Tenant
from hplm.core.settings import BaseConfig, Batching
from hplm.engine.adapter_plan import gathers, own_product_tokens, plan_adapters
from hplm.engine.adapter_slots import AdapterSlots, AssignedSlots
from hplm.engine.importance import Importance, KeptAttention
from hplm.engine.kernels.adapt import AdapterPlan
from hplm.engine.kernels.int8 import Ranges, check_int8, quantise_layer
from hplm.engine.kernels.run_layers import RunLayers
from hplm.engine.kernels.scripted import scripted
from hplm.engine.layouts import Layout, lay_out
from hplm.engine.students.copies import copies_of, cut, weighted_logits
from hplm.engine.students.own_batch import OWN_SLOTS, OwnBatches, takes_own
from hplm.engine.token_domain import Features, no_features
from hplm.errors import ConfigError, CorruptArtifactError
from hplm.models.layers import UpperLayers, layer_weights
from hplm.runtime.tracing import Tracer
from hplm.tasks.task import Logits, Task
from hplm.tasks.task_loader import task_named


@dataclass(frozen=True)
class EngineRequest:
    """A text after the look-up: `features` `[T, H]`, or of a whole base `[T, 2]`, see `hplm.engine.token_domain`.

    An engine of later layers reads hidden states `[T, H]` in float32, of either kind of base.
    `keeps_attention`: the importance of the text's tokens may be asked for after its logits are known. `students` is k, the
    number of students that answer: at most those of the tenant, and 1 of an ordinary tenant.
    """

    tenant: Tenant
    features: Features | npt.NDArray[np.float32]
    keeps_attention: bool = False
    students: int = 1

    @property
    def has_own_layers(self) -> bool:
        """Whether the tenant's students have own layers."""
        return self.tenant.card.student_form == "own"


@dataclass(frozen=True)
class EncodedTexts:
    """Computed texts of a batch: `texts` are the numbers of requests, and `outputs` the outputs of the requests' heads.

    If the engine lacks the last layer, `outputs` are the hidden states `[T, H]` after its layers.
    `students` are the numbers of students that answered. `attention` is None if no text keeps attention. Its text i is that of
    request `texts[i]`, read by the first student.
    """

    texts: list[int]
    outputs: list[Logits]
    attention: KeptAttention | None
    students: list[int]


class EncodeEngine:
    """An engine that runs batches over one set of upper layers. Not thread-safe, but `slots.prefetch` may run beside it.

    `row_tokens` and `pad_to` are those of `hplm.engine.layouts`. If products are computed in int8, `int8` holds
    the ranges of each layer, see `hplm.engine.kernels.int8`. Raises ConfigError if the device has no int8.
    Students with own layers have `own_slots`, if the base's layers are small enough. Own layers are never in int8.
    With `layers` the engine computes these layers of the base alone, which `upper` and `int8` have; tenants' adapters are those
    of AdapterSlots' `in_layers`. Such an engine has no students and no importances.
    """

    def __init__(
        self,
        config: BaseConfig,
        upper: UpperLayers,
        *,
        num_slots: int,
        reduced_size: int,
        device: torch.device,
        dtype: torch.dtype,
        batching: Batching = "packed",
        row_tokens: int = 128,
        pad_to: int = 0,
        fine_prefetch: bool = True,
        int8: Sequence[Ranges] = (),
        own_slots: int = OWN_SLOTS,
        layers: range | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.layers = range(config.upper_layers) if layers is None else layers
        if int8:
            check_int8(device)
        self.config = config
        self.device = device
        self.dtype = dtype
        self.slots = AdapterSlots(
            config,
            num_slots,
            reduced_size,
            device,
            dtype,
            fine_prefetch=fine_prefetch,
            # The bank's bfloat16 is fine enough beside int8 matrices too, at half the memory.
            keep_bfloat16=dtype == torch.bfloat16 or bool(int8),
            layers=layers,
            tracer=tracer,
        )
        self._tracer = tracer or Tracer(None, "")
        # Tokens of all batches so far, with padding and fillers.
        self.computed_tokens = 0
        self._gathers = gathers(device, dtype)
        self._batching: Batching = batching
        self._row_tokens = row_tokens
        self._pad_to = pad_to
        self._upper = upper.to(device).eval().requires_grad_(False)
        pairs = zip(self._upper.layers, int8, strict=True) if int8 else ()
        quantised = [quantise_layer(layer, ranges) for layer, ranges in pairs]
        # The residual stream has the layers' format too. It is normalised after every sub-layer, so rounding errors do not add
        # up. Casting it back and forth took a tenth of the time.
        self._upper.layers.to(dtype)
        weights = [layer_weights(layer) for layer in self._upper.layers]
        relative = None
        if self._upper.relative is not None:
            # Attention on a CPU is in fp32, see RunLayers.
            longest = max(config.max_tokens, row_tokens, pad_to)
            relative = self._upper.relative(longest).to(dtype if device.type == "cuda" else torch.float32)
        self._relative = relative
        self._layers = scripted(
            RunLayers(
                weights,
                self.slots.parts,
                config.layer_norm_eps,
                config.num_heads,
                relative,
                int8=quantised,
            )
        )
        # RunLayers has its own copy of the matrices.
        self._upper.layers = nn.ModuleList()
        # Only packed batches run copies of a text, see `check`.
        takes = own_slots > 0 and batching == "packed" and self.has_all_layers and takes_own(config)
        self._own = OwnBatches(config, own_slots, device, dtype, relative) if takes else None

    @property
    def has_all_layers(self) -> bool:
        """Whether the engine computes all upper layers of its base."""
        return len(self.layers) == self.config.upper_layers

    @property
    def reads_states(self) -> bool:
        """Whether the engine reads the hidden states of earlier layers, not the features of texts."""
        return self.layers.start > 0

    @property
    def has_heads(self) -> bool:
        """Whether the engine has the last layer, so that its outputs are those of heads."""
        return self.layers.stop == self.config.upper_layers

    def no_features(self, length: int) -> Features | npt.NDArray[np.float32]:
        """Return zeros as the input of a text of `length` tokens, for measuring."""
        if self.reads_states:
            return np.zeros((length, self.config.hidden_size), np.float32)
        return no_features(self.config, length)

    def close(self) -> None:
        """End the thread that fills adapter slots."""
        self.slots.close()

    def check(self, tenant: Tenant) -> None:
        """Raise ConfigError if the engine cannot run all students of a tenant, CorruptArtifactError if their layers do not fit.

        In a batch such a tenant would fail the requests of all tenants.
        """
        config, students = self.config, tenant.students
        if students is None:
            return
        name = f"tenant {tenant.card.name}, version {tenant.version}"
        if not self.has_all_layers:
            raise ConfigError(f"{name}: students want a single encode stage: export the base without --stages")
        if self._batching != "packed":
            raise ConfigError(f"{name}: students want batching packed, it is {self._batching}")
        most = self.slots.num_slots - 1
        if students.own is not None:
            if self._own is None:
                raise ConfigError(
                    f"{name}: the layers of base {config.name} are too large for students with own layers"
                )
            most = self._own.slots.num_slots
            sizes = (students.own.num_layers, students.own.hidden_size, students.own.intermediate_size)
            wanted = (config.upper_layers, config.hidden_size, config.intermediate_size)
            if sizes != wanted:
                raise CorruptArtifactError(f"{name}: own layers of sizes {sizes}, the base's layers have {wanted}")
        for packed in students.packed:
            if (len(packed.weights), packed.hidden_size) != (config.adapted_layers, config.hidden_size):
                raise CorruptArtifactError(f"{name}: a student's adapter does not fit base {config.name}")
        if students.count > most:
            raise ConfigError(
                f"{name}: {students.count} students want as many slots, there are {most}: raise num_slots"
            )

    def run(self, requests: Sequence[EngineRequest], slot_tokens: int | None = None) -> list[Logits]:
        """Return the outputs of each request's head, in order: `[1, labels]`, or `[T, n * labels]` if the task reads tokens.

        If the engine lacks the last layer, return hidden states, see EncodedTexts.
        """
        outputs: list[Logits | None] = [None] * len(requests)
        for part in self.run_each(requests, slot_tokens):
            for index, answer in zip(part.texts, part.outputs, strict=True):
                outputs[index] = answer
        return [answer for answer in outputs if answer is not None]

    def run_with_importance(self, requests: Sequence[EngineRequest]) -> list[tuple[Logits, Importance]]:
        """Return what `run` does, and the importance of each token `[T]`, see `hplm.engine.importance`."""
        found: dict[int, tuple[Logits, Importance]] = {}
        for part in self.run_each([replace(request, keeps_attention=True) for request in requests]):
            assert part.attention is not None
            importances = part.attention.importances(range(len(part.texts)))
            found |= dict(zip(part.texts, zip(part.outputs, importances, strict=True), strict=True))
        return [found[index] for index in range(len(requests))]

    def run_each(self, requests: Sequence[EngineRequest], slot_tokens: int | None = None) -> Iterator[EncodedTexts]:
        """Yield parts of the batch as they are ready. A part's memory is freed after it, unless the caller keeps the part."""
        for part in self._parts(requests):
            texts = [copies_of(requests[i]) for i in part]
            if texts[0][0].has_own_layers:
                yield EncodedTexts(part, *self._run_own(texts), [len(copies) for copies in texts])
                continue
            members = list(chain(*texts))
            # Copies are neighbours in a packed batch. Other batches have a copy of each text, so each copy stands for its text.
            text_of = [number for number, copies in zip(part, texts, strict=True) for _ in copies]
            with self.slots.assigned([member.tenant for member in members]) as assigned:
                lengths = [len(member.features) for member in members]
                for layout in lay_out(self._batching, lengths, self._row_tokens, slot_tokens, self._pad_to):
                    numbers = Counter(text_of[i] for i in layout.texts)
                    owners = [requests[number].tenant for number in numbers]
                    answers = self._run_layout(members, layout, assigned, owners, list(numbers.values()))
                    yield EncodedTexts(list(numbers), *answers, list(numbers.values()))

    def _parts(self, requests: Sequence[EngineRequest]) -> list[list[int]]:
        """Return the requests' positions sorted by length, so that attention needs few calls.

        Texts of students with own layers are in parts of their own. If slots are too few, there are more parts, see `cut`.
        """
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].features))
        parts = cut(requests, [i for i in order if not requests[i].has_own_layers], self.slots.num_slots - 1)
        if self._own is not None:
            parts += cut(requests, [i for i in order if requests[i].has_own_layers], self._own.slots.num_slots)
        return parts

    def _run_own(self, texts: Sequence[list[EngineRequest]]) -> tuple[list[Logits], KeptAttention | None]:
        """Run texts whose students have own layers, each with its copies."""
        assert self._own is not None
        students = [(copy.tenant, number) for copies in texts for number, copy in enumerate(copies)]
        members = list(chain(*texts))
        with self._own.slots.assigned(students) as slots, torch.inference_mode():
            # Grouped products want the tokens of a slot one after another.
            order = sorted(range(len(members)), key=lambda i: slots[i])
            copies = [members[i] for i in order]
            (layout,) = lay_out("packed", [len(copy.features) for copy in copies], self._row_tokens)
            counts = [count_read(copy.tenant, length) for copy, length in zip(copies, layout.lengths, strict=True)]
            keeps_attention = any(copy.keeps_attention for copy in copies)
            self.computed_tokens += layout.size
            with self._tracer.span("own layers", students=len(set(slots))):
                state, qkv, starts = self._own.run(
                    self._embed(copies, layout), [slots[i] for i in order], layout.lengths, counts, keeps_attention
                )
            places = np.argsort(order)
            kept = None
            if keeps_attention:
                firsts = places[np.cumsum([0, *(len(copies) for copies in texts[:-1])])]
                kept = self._kept(qkv, [starts[i] for i in firsts], [layout.lengths[i] for i in firsts])
            tenants = [copies[0].tenant for copies in texts]
            return weighted_logits(tenants, [len(copies) for copies in texts], pooled(counts, state)[places]), kept

    def _kept(self, qkv: list[Tensor], starts: Sequence[int], lengths: Sequence[int]) -> KeptAttention:
        return KeptAttention(qkv, starts, lengths, self.config.num_heads, self._relative)

    def _run_layout(
        self,
        members: list[EngineRequest],
        layout: Layout,
        assigned: AssignedSlots,
        owners: Sequence[Tenant],
        numbers: Sequence[int],
    ) -> tuple[list[Logits], KeptAttention | None]:
        """Run a layout of copies. Text i, of the tenant `owners[i]`, has `numbers[i]` copies, one after another."""
        texts = [members[i] for i in layout.texts]
        keeps_attention = any(text.keeps_attention for text in texts)
        kept = None
        attention, mask = layout.attention, layout.attention.mask
        with torch.inference_mode():
            in_chunks = any(owner.card.students > 1 for owner in owners)
            at_input, at_attention = (
                self._adapters(layout, assigned.at(place), in_chunks) for place in get_args(Place)
            )
            # The next stage reads all tokens.
            counts = [
                count_read(text.tenant, length) if self.has_heads else length
                for text, length in zip(texts, layout.lengths, strict=True)
            ]
            read, at_attention_of_read = None, at_attention
            holds_read_alone = sum(counts) < sum(layout.lengths)
            if holds_read_alone:
                read = places_of(layout.starts, counts).to(self.device)
                slots = assigned.at("attention")
                slots = [slots[i] for i in layout.texts]
                at_attention_of_read = self._plan(slots, counts, in_chunks)
            state = self._embed(texts, layout)
            if mask is not None:
                mask = mask.to(self.device)
            run = self._layers
            run.begin(
                state,
                attention.counts,
                attention.lengths,
                mask,
                at_input,
                at_attention,
                read,
                at_attention_of_read,
            )
            if keeps_attention:
                run.keep_qkv()
            self.computed_tokens += run.hidden.size(0)
            # Python's references are dropped, because each would take the interpreter's lock again and again.
            del state, mask, at_input, at_attention, read, at_attention_of_read
            try:
                first, layers = 0, len(self.layers)
                first_adapted = layers - len(self.slots.rows)
                while first < layers:
                    # All remaining layers in one call, unless slots are not filled yet or each layer is traced. Every return
                    # waits for the interpreter's lock, which threads that read and answer hold. Layers without adapters need
                    # no slot.
                    at_once = layers if assigned.filled else max(first_adapted, first + 1)
                    last = first + 1 if self._tracer.is_on else at_once
                    for index in range(max(first, first_adapted), last):
                        assigned.wait(index - first_adapted)
                    with self._tracer.span("layer", index=first):
                        run(first, last)
                    first = last
                if keeps_attention:
                    firsts = [0, *accumulate(numbers[:-1])]
                    starts, lengths = [layout.starts[i] for i in firsts], [layout.lengths[i] for i in firsts]
                    kept = self._kept(run.kept_qkv(), starts, lengths)
            finally:
                state = run.end()
            if not holds_read_alone and not layout.is_packed:
                state = state.index_select(0, places_of(layout.starts, counts).to(self.device))
            if not self.has_heads:
                return np.split(state.float().cpu().numpy(), np.cumsum(counts)[:-1]), kept
            return head_logits(owners, counts, state, numbers), kept

    def _embed(self, texts: list[EngineRequest], layout: Layout) -> Tensor:
        """Return the input of the engine's first layer, with the texts' tokens in their places: `[size, H]`."""
        # One copy and one conversion for all texts take half the time of a conversion for each text.
        real = torch.from_numpy(np.concatenate([text.features for text in texts])).to(self.device)
        ends = np.cumsum(layout.lengths)
        steps = np.arange(ends[-1]) - np.repeat(ends - layout.lengths, layout.lengths)
        state = real if self.reads_states else self._upper.embed(real, torch.from_numpy(steps).to(self.device))
        state = state.to(self.dtype)
        if layout.is_packed:
            return state
        places = torch.from_numpy(steps + np.repeat(layout.starts, layout.lengths))
        return state.new_zeros(layout.size, state.shape[1]).index_copy_(0, places.to(self.device), state)

    def _adapters(self, layout: Layout, slot_of: Sequence[int], in_chunks: bool) -> AdapterPlan:
        """Plan each text's adapter over its own tokens; padding has the identity. `slot_of` has the slot of each text."""
        slots: list[int] = []
        lengths: list[int] = []
        end = 0
        for i in sorted(range(len(layout.starts)), key=lambda i: layout.starts[i]):
            if gap := layout.starts[i] - end:
                slots.append(IDENTITY)
                lengths.append(gap)
            slots.append(slot_of[layout.texts[i]])
            lengths.append(layout.lengths[i])
            end = layout.starts[i] + layout.lengths[i]
        if gap := layout.size - end:
            slots.append(IDENTITY)
            lengths.append(gap)
        return self._plan(slots, lengths, in_chunks)

    def _plan(self, slots: Sequence[int], lengths: Sequence[int], in_chunks: bool) -> AdapterPlan:
        """Plan adapters; `in_chunks` alone for tenants with students, so that the number of products grows with no student.

        Chunks cost them nothing: between 5 % less and 3 % more time of a batch (MiniLM's size, two layers, one core, by hand).
        """
        return plan_adapters(
            slots,
            lengths,
            self.device,
            num_slots=self.slots.num_slots,
            gathered=self._gathers or in_chunks,
            own_tokens=None if in_chunks else own_product_tokens(self.device),
        )


def head_logits(
    tenants: Sequence[Tenant], counts: Sequence[int], state: Tensor, numbers: Sequence[int] | None = None
) -> list[Logits]:
    """Compute each text's logits by its tenant's head, which reads `counts[i]` hidden states of copy i in `state` `[N, H]`.

    Text i has `numbers[i]` copies, one after another; None: one each. Logits are `[1, labels]`, or `[T, n * labels]` for a
    tagging. Pooling runs on the device, heads on the host: a head is a few KB and serves one text.
    """
    numbers = numbers or [1] * len(tenants)
    means = pooled(counts, state)
    if not any(task_named(tenant.card.task).reads_tokens for tenant in tenants):
        return weighted_logits(tenants, numbers, means)
    ends = np.cumsum(counts)
    answers: list[Logits] = []
    for tenant, number, first in zip(tenants, numbers, accumulate(numbers, initial=0), strict=False):
        if task_named(tenant.card.task).reads_tokens:
            features = state[ends[first] - counts[first] : ends[first]].float().cpu().numpy()
            answers.append(features @ tenant.head.weight.T + tenant.head.bias)
        else:
            answers += weighted_logits([tenant], [number], means[first : first + number])
    return answers


def pooled(counts: Sequence[int], state: Tensor) -> npt.NDArray[np.float32]:
    """Compute the mean of each copy's `counts[i]` hidden states in `state` `[N, H]`: `[copies, H]`, on the host."""
    state = state.float()
    every = torch.arange(len(state), device=state.device)
    ends = np.cumsum(counts)
    bags = torch.from_numpy(ends - counts).to(state.device)
    # The means of `segment_reduce`, but fast on a CPU. The mean of one token, `[CLS]`, is the token itself.
    means: npt.NDArray[np.float32] = F.embedding_bag(every, state, bags, mode="mean").cpu().numpy()
    return means


def count_read(tenant: Tenant, length: int) -> int:
    """Return how many of a text's last hidden states its tenant's head reads, from the first on: `[CLS]` alone, or all."""
    reads_first = tenant.card.pooling == "cls" and not task_named(tenant.card.task).reads_tokens
    return 1 if reads_first else length


def places_of(starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Return `counts[i]` places from `starts[i]` on, one text after another: int64."""
    ends = np.cumsum(counts)
    return torch.from_numpy(np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1]))


def pool(task: Task, pooling: str, hidden: Tensor) -> Tensor:
    """Return the hidden states that a head reads: every token's, or one row, that of `[CLS]` or the mean of all tokens."""
    if task.reads_tokens:
        return hidden
    return hidden[:1] if pooling == "cls" else hidden.mean(0, keepdim=True)
