"""The options that describe a workload, and the assumptions that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from hplm_builder.placement.planned_workload import trace_assumptions

from hplm.errors import ConfigError
from hplm.placement.plan import Assumptions
from hplm.placement.served_model import ServedModel
from hplm.workloads.arrivals import require_positive

RateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rate", metavar="BASE=N", help="Requests a second of a base, by the model that clients call. Repeat it."
    ),
]
CvOption = Annotated[
    float | None,
    typer.Option(
        help="Burstiness: coefficient of variation of the gaps between requests; 1 is Poisson.", show_default="1"
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(help="CSV file with a column TIMESTAMP; its arrivals are divided among bases by their rates."),
]
DeadlineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--deadline-ms",
        metavar="[BASE=]MS",
        help="Deadline of a request, for all bases or for one base. Repeat it.",
        show_default="five times the base's latency",
    ),
]
SecondsOption = Annotated[
    float | None, typer.Option(help="Length of the simulated workload.", show_default="600, or the length of the trace")
]
SeedOption = Annotated[int | None, typer.Option(help="Seed of the drawn requests.", show_default="0")]
# The deadline of a base without one, as a multiple of its latency (AlpaServe 6.2).
DEADLINE_SCALE = 5.0


def numbers_by_base(option: str, values: Sequence[str] | None, known: Sequence[str] = ()) -> dict[str, float]:
    """Return the number of each base of `BASE=NUMBER` values. Raises ConfigError, which names the option."""
    numbers: dict[str, float] = {}
    for value in values or ():
        base, equals, text = value.rpartition("=")
        if not equals or base in numbers:
            raise ConfigError(f"{option}: one BASE=NUMBER for each base was expected, got {value!r}")
        if known and base not in known:
            raise ConfigError(f"{option}: a base of {', '.join(known)} was expected, got {base!r}")
        numbers[base] = _number(option, text)
    return numbers


def deadlines_ms(
    values: Sequence[str] | None, models: Sequence[ServedModel], outside_ms: Mapping[str, float]
) -> dict[str, float]:
    """Return the deadline of each base in ms: its own, that of all bases, or a multiple of its latency."""
    plain = [value for value in values or () if "=" not in value]
    if len(plain) > 1:
        raise ConfigError(f"--deadline-ms: one deadline for all bases was expected, got {', '.join(plain)}")
    own = numbers_by_base(
        "--deadline-ms", [value for value in values or () if "=" in value], [model.name for model in models]
    )
    for_all = _number("--deadline-ms", plain[0]) if plain else None
    latency_ms = {model.name: 1000 * model.latency_s + outside_ms.get(model.name, 0.0) for model in models}
    return {base: own.get(base, for_all or round(DEADLINE_SCALE * ms, 1)) for base, ms in latency_ms.items()}


def assumed_workload(
    models: Sequence[ServedModel],
    rates: Mapping[str, float],
    cv: float | None,
    trace: Path | None,
    deadline_ms: Mapping[str, float],
    tokens: int,
    seconds: float | None,
    seed: int | None,
    outside_ms: Mapping[str, float],
) -> Assumptions:
    """Return the assumptions that the options describe. Raises ConfigError, or DataError if the trace cannot be read."""
    if trace is not None and cv is not None:
        raise ConfigError("--cv is not for a trace, which has its own gaps: leave --cv or --trace out")
    if cv is not None:
        require_positive(cv=cv)
    names = [model.name for model in models]
    if trace is None:
        if not rates:
            raise ConfigError("requests a second were expected: give --rate BASE=N for each base, or --trace FILE")
        said = " ".join(f"--rate {base}={rate:g}" for base, rate in rates.items())
        workload = Assumptions(
            dict(rates), 1.0 if cv is None else cv, dict(deadline_ms), tokens, f"{said} --cv {cv or 1:g}"
        )
    else:
        all_rates, trace_cv, length_s = trace_assumptions(trace, tuple(names), rates)
        workload = Assumptions(
            all_rates,
            round(trace_cv, 3),
            dict(deadline_ms),
            tokens,
            f"--trace {trace}",
            str(trace.absolute()),
            length_s,
        )
    return replace(changed_workload(workload, seconds=seconds, seed=seed), outside_ms=dict(outside_ms))


def changed_workload(
    assumed: Assumptions,
    *,
    rates: Mapping[str, float] | None = None,
    cv: float | None = None,
    trace: Path | None = None,
    deadline_ms: Mapping[str, float] | None = None,
    seconds: float | None = None,
    seed: int | None = None,
) -> Assumptions:
    """Return other assumptions. What is not given stays."""
    changed = assumed
    if trace is not None:
        all_rates, trace_cv, length_s = trace_assumptions(
            trace, tuple(assumed.rates), {**assumed.rates, **(rates or {})}
        )
        changed = replace(
            changed,
            rates=all_rates,
            cv=trace_cv,
            trace=str(trace.absolute()),
            duration_s=length_s,
            source=f"--trace {trace}",
        )
    if rates:
        changed = replace(changed, rates={**assumed.rates, **rates})
    if cv is not None:
        require_positive(cv=cv)
        changed = replace(changed, cv=cv, trace="")
    if deadline_ms:
        changed = replace(changed, deadline_ms={**assumed.deadline_ms, **deadline_ms})
    if seconds is not None:
        require_positive(seconds=seconds)
        changed = replace(changed, duration_s=seconds)
    return changed if seed is None else replace(changed, seed=seed)


def _number(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        raise ConfigError(f"{option}: a number above 0 was expected, got {text!r}")
    return number
