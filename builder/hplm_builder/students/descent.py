"""The loop of both algorithms: epochs of batches, the weights of the best epoch on dev kept, an early end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hplm.errors import ConfigError
from hplm.models.device import CPU
from hplm_builder.convert.checkpoint import Checkpoint, digest_of, random_state, set_random_state
from hplm_builder.convert.learning_rate import triangle
from hplm_builder.tenants.bodies import copy_state
from hplm_builder.tenants.finetune import TRAINING_COST
from hplm_builder.tenants.prepared import Prepared, count_tokens, packed_batches

# The learning rate of multipliers, which are single numbers near 1: the rates of weights would hardly move them.
ALPHA_RATE = 1e-2
# The share of the steps in which the learning rate rises.
WARMUP_SHARE = 0.1


@dataclass(frozen=True)
class Descent:
    """How to minimise a loss: at most `epochs`, at the highest rate `learning_rate`. See `StudentSettings`."""

    epochs: int
    learning_rate: float
    batch_examples: int
    weight_decay: float
    patience: int
    seed: int

    def run(
        self,
        what: str,
        model: nn.Module,
        alphas: Sequence[nn.Parameter],
        examples: list[Prepared],
        loss: Callable[[list[Prepared]], Tensor],
        judge: Callable[[], tuple[float, ...]],
        tick: Callable[[int], None],
    ) -> list[dict[str, float]]:
        """Train the parameters of `model`, of which `alphas` are multipliers, and leave the best epoch's weights in it.

        `judge` scores the model on dev; higher is better, and the untrained model is epoch 0. `tick` is called with the tokens
        that each batch costs. Returns a row for each epoch: `epoch`, `loss`, `dev`. Raises ConfigError, which names `what`, if
        the loss is not finite, and what `tick` raises.
        """
        own = {id(alpha) for alpha in alphas}
        weights = [each for each in model.parameters() if each.requires_grad and id(each) not in own]
        groups = [{"params": weights, "share": 1.0}]
        if alphas:
            groups.append({"params": [*alphas], "share": ALPHA_RATE / self.learning_rate, "weight_decay": 0.0})
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True)
        values = [tensor for example in examples for tensor in (example.features, example.targets)]
        checkpoint = Checkpoint.of(
            what, lambda: {**asdict(self), "start": digest_of([*model.state_dict().values(), *values])}
        )
        saved = checkpoint.load(CPU)
        done, best_epoch, summed = 0, 0, 0.0
        if saved is None:
            best, kept = judge(), copy_state(model)
            curve = [_row(0, math.nan, best)]
        else:
            best, best_epoch, kept, curve = (saved[name] for name in ("best", "best_epoch", "kept", "curve"))
            best = tuple(best)
        if saved is not None and "model" in saved:
            done, summed = saved["step"], saved["summed"]
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            set_random_state(saved["random"], CPU)

        def found() -> dict[str, Any]:
            return {"best": [*best], "best_epoch": best_epoch, "kept": kept, "curve": curve}

        def state() -> dict[str, Any]:
            trained = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": random_state(CPU)}
            return {**found(), **trained, "step": done, "summed": summed}

        rng = np.random.default_rng(self.seed)
        steps = len(packed_batches(examples, self.batch_examples, rng)) * self.epochs
        # The checkpoint of a training that has ended holds what the training found.
        epochs = self.epochs if saved is None or "model" in saved else 0
        step, done_before = 0, done
        with checkpoint.keeping(state):
            for epoch in range(1, epochs + 1):
                batches = packed_batches(examples, self.batch_examples, rng)
                is_judged = step + len(batches) < done_before
                if step >= done_before:
                    summed = 0.0
                for batch in batches:
                    if step >= done_before:
                        rate = self.learning_rate * triangle(step, steps, WARMUP_SHARE)
                        for group in optimizer.param_groups:
                            group["lr"] = rate * group["share"]
                        value = loss(batch)
                        optimizer.zero_grad(set_to_none=True)
                        value.backward()
                        nn.utils.clip_grad_norm_([*weights, *alphas], 1.0)
                        optimizer.step()
                        summed += value.item() * len(batch) / len(examples)
                        done = step + 1
                    step += 1
                    tick(TRAINING_COST * count_tokens(batch))
                    checkpoint.reached()
                if is_judged:
                    continue
                if not math.isfinite(summed):
                    checkpoint.remove()
                    raise ConfigError(f"{what} diverged at learning rate {self.learning_rate:g}: choose a smaller one")
                score = judge()
                curve.append(_row(epoch, summed, score))
                if score > best:
                    best, best_epoch, kept = score, epoch, copy_state(model)
                elif epoch - best_epoch >= self.patience:
                    break
        if epochs:
            checkpoint.save(found())
        model.load_state_dict(kept)
        return curve


def _row(epoch: int, loss: float, score: tuple[float, ...]) -> dict[str, float]:
    row = {"loss": loss, "dev": score[0]} if math.isfinite(loss) else {"dev": score[0]}
    return {"epoch": epoch, **{key: float(f"{value:.5g}") for key, value in row.items()}}
