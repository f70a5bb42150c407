"""All benchmarks: what each measures, its options, and what a quick look changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from hplm.core.settings import Quantization
from hplm.errors import ConfigError
from hplm.placement.table1 import ModelSet
from hplm.scheduling.policy_loader import load_policy
from hplm_loadtest.benchmarks.access.flood import access_flood
from hplm_loadtest.benchmarks.access.throughput import access_throughput
from hplm_loadtest.benchmarks.engine.adapters import adapters
from hplm_loadtest.benchmarks.engine.importance import importance
from hplm_loadtest.benchmarks.engine.int8 import int8
from hplm_loadtest.benchmarks.engine.limit import limit
from hplm_loadtest.benchmarks.engine.lookup import plot_lookup
from hplm_loadtest.benchmarks.engine.upper import upper_layers
from hplm_loadtest.benchmarks.experiment import Experiment, Option
from hplm_loadtest.benchmarks.failures.recovery import recovery
from hplm_loadtest.benchmarks.papers.batching import MODES, batching
from hplm_loadtest.benchmarks.papers.schedulers import POLICIES, SETTINGS, schedulers
from hplm_loadtest.benchmarks.placement.device_fidelity import device_fidelity
from hplm_loadtest.benchmarks.placement.emulated_fidelity import emulated_fidelity
from hplm_loadtest.benchmarks.placement.encode_stages import encode_stages
from hplm_loadtest.benchmarks.placement.search_time import search_time
from hplm_loadtest.benchmarks.placement.sweep import POLICIES as PLACEMENT_POLICIES
from hplm_loadtest.benchmarks.placement.sweep import Arrivals, Axis, placement_sweep
from hplm_loadtest.benchmarks.served_repository import DEMO
from hplm_loadtest.benchmarks.serving.burst import burst
from hplm_loadtest.benchmarks.serving.cascade import cascade
from hplm_loadtest.benchmarks.serving.memory import COUNTS, memory_by_tenants
from hplm_loadtest.benchmarks.serving.mixed import mixed
from hplm_loadtest.benchmarks.serving.overload import TIMES, overload
from hplm_loadtest.benchmarks.serving.pipeline import pipeline
from hplm_loadtest.benchmarks.serving.request import whole_requests
from hplm_loadtest.benchmarks.serving.response import TENANTS as RESPONSE_TENANTS
from hplm_loadtest.benchmarks.serving.response import response
from hplm_loadtest.benchmarks.serving.route import route
from hplm_loadtest.benchmarks.serving.students import students
from hplm_loadtest.benchmarks.serving.throughput_by_tenants import TENANTS, Popularity, throughput_by_tenants
from hplm_loadtest.benchmarks.serving.trace import trace
from hplm_loadtest.benchmarks.serving.waves import SIZES, waves
from hplm_loadtest.peers.systems import Shape, SystemName

FLEET = Path("build/fleet-bert-base-10000/models")
TEXTS = (
    "pool: texts that a fleet's tables know; unseen: sentences of Wikipedia; shuffled: their words in random orders; "
    "examples: the tenants' example texts; or a file of texts, one a line."
)


def rates_of(values: Sequence[str]) -> dict[str, float]:
    """Read `NAME=REQUESTS_PER_SECOND`. Raises ConfigError for anything else, and for a name that is given twice."""
    rates: dict[str, float] = {}
    for value in values:
        name, _, rate = value.partition("=")
        try:
            per_s = float(rate)
        except ValueError:
            raise ConfigError(f"--rate {value!r} is not NAME=REQUESTS_PER_SECOND, for example hbert=120") from None
        if name in rates:
            raise ConfigError(f"--rate names {name!r} twice")
        rates[name] = per_s
    return rates


def policies_of(names: list[str]) -> list[str]:
    """Check the names of policies before a server is started. Raises ConfigError with the names of all policies."""
    for name in names:
        load_policy(name, {})
    return names


def policy_of(name: str) -> str:
    return policies_of([name])[0]


# Options of several benchmarks, by parameter.
OPTIONS: dict[str, Option] = {
    "models": Option(help="Triton model repository."),
    "folder": Option(flag="fleet", help="Folder of `hplm build fleet`. Default: build/fleet-SHAPE-10000."),
    "shape": Option(help="Which fleet: the size of its base.", choices=get_args(Shape)),
    "text_kind": Option(flag="texts", help=TEXTS),
    "rounds": Option(help="Rounds that count.", least=1),
    "seconds": Option(help="Seconds of each load.", least=0.5),
    "duration_s": Option(flag="duration", help="Seconds of each load.", least=0.5),
    "in_flight": Option(help="Requests under way at saturation.", least=1),
    "singles": Option(help="Requests to each variant, one at a time, per round.", least=10),
    "count": Option(help="Requests or texts of a round.", least=1),
    "counts": Option(flag="tenants", help="Number of tenants; again for more.", least=1),
    "num_threads": Option(flag="threads", help="Threads of torch.", least=1),
    "device_name": Option(flag="device", help="auto, cpu or cuda.", choices=("auto", "cpu", "cuda")),
    "look_up_threads": Option(help="Threads that compute n-grams that no table has; 0: one, as served.", least=0),
    "requests_file": Option(
        flag="requests", help="JSON lines of task, tenant, text, label: `hplm eval cascade --requests`."
    ),
    "trace": Option(help="Recorded arrivals: a CSV file with a column TIMESTAMP."),
    "seed": Option(help="Another seed draws other requests.", least=0),
}

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "plot-lookup",
        plot_lookup,
        "Measure a 128-token look-up from memory, and how many windows of unseen text each level answers.",
        "hplm bench plot-lookup --json plot-lookup.json",
        {"models": DEMO, "rounds": 9},
        in_all="",
        in_quick="--rounds 2",
    ),
    Experiment(
        "upper",
        upper_layers,
        "Measure the tokens per second of the upper layers, packed and padded, and the share of the machine's matrix peak.",
        "hplm bench upper --threads 2",
        {"models": DEMO, "rounds": 9, "num_threads": 1, "device_name": "auto"},
        in_all="",
        in_quick="--rounds 2",
    ),
    Experiment(
        "adapters",
        adapters,
        "Measure one layer's adapters of 1 to 64 tenants: batched products, text by text, a plain loop, grouped_mm.",
        "hplm bench adapters --json adapters.json",
        {"rounds": 9, "num_threads": 1, "device_name": "auto"},
        in_all="",
        in_quick="--rounds 2",
    ),
    Experiment(
        "importance",
        importance,
        "Measure what importances of words, by which a cascade prunes texts, cost beside the batch of the level.",
        "hplm bench importance --json importance.json",
        {"rounds": 9, "num_threads": 1, "device_name": "auto"},
        in_all="",
        in_quick="--rounds 2",
    ),
    Experiment(
        "request",
        whole_requests,
        "Measure the latency of one request at a time and the throughput of many, over gRPC and HTTP, on a real server.",
        "hplm bench request --concurrency 64 --together 1",
        {
            "models": DEMO,
            "rounds": 5,
            "count": 2000,
            "concurrency": Option(256, "Texts under way at saturation.", least=1),
            "request_sizes": Option([1, 16, 64], "Texts in a request; again for more.", "together", least=1, most=64),
        },
        in_all="",
        in_quick="--rounds 1 --count 400",
    ),
    Experiment(
        "route",
        route,
        "Measure the cost of the model `hplm`, which routes by tenant, over calling the base's model: alone and at saturation.",
        "hplm bench route --models build/fleet-minilm-10000/models --texts pool --json route.json",
        {
            "models": DEMO,
            "text_kind": "unseen",
            "rounds": 5,
            "pairs": Option(400, "Requests to each model, one at a time, per round.", least=10),
            "in_flight": 256,
            "seconds": 10.0,
        },
        {"rounds": 1, "pairs": 100, "seconds": 3.0},
        in_all="--models {minilm} --texts pool",
    ),
    Experiment(
        "stages",
        encode_stages,
        "Measure one encode stage against two on the same two cores: single requests and saturation, in turns.",
        "hplm bench stages --models build/fleet-minilm-16/models --json stages.json",
        {"models": DEMO, "text_kind": "pool", "rounds": 5, "singles": 200, "in_flight": 256, "seconds": 5.0},
        {"rounds": 2, "singles": 50, "seconds": 2.0},
        in_all="--models {minilm}",
    ),
    Experiment(
        "access-throughput",
        access_throughput,
        "Measure the throughput of a server with keys and quotas, over that of a server without, in turns.",
        "hplm bench access-throughput --models build/demo/models --json access-throughput.json",
        {"models": DEMO, "text_kind": "unseen", "rounds": 6, "in_flight": 256, "seconds": 10.0},
        {"rounds": 2, "seconds": 2.0},
    ),
    Experiment(
        "access-flood",
        access_flood,
        "Measure other tenants' response times without and with a tenant at ten times its share: fair shares, and quotas.",
        "hplm bench access-flood --json access-flood.json",
        {
            "models": DEMO,
            "text_kind": "unseen",
            "tenants": Option(help="Tenants that send requests.", least=2),
            "load": Option(help="What each other tenant sends, in shares of the capacity.", least=0.01),
            "times": Option(help="What the flooding tenant sends, in shares.", least=1),
            "quota": Option(help="Each tenant's quota, in shares, in the runs with quotas.", least=0.1),
        },
        {"rounds": 1, "duration_s": 3.0},
    ),
    Experiment(
        "mixed",
        mixed,
        "Measure response times of two bases or more of one server: each alone, and all together at the same rates.",
        "hplm bench mixed --models models --rate hbert=120 --rate minilm=60",
        {
            "models": DEMO,
            "rates": Option(
                help="NAME=REQUESTS_PER_SECOND of a base's model; once for each base.", flag="rate", read=rates_of
            ),
            "text_kind": "unseen",
            "rounds": 5,
            "duration_s": 8.0,
        },
    ),
    Experiment(
        "cascade",
        cascade,
        "Measure cascades beside each base alone and a vote of all bases: one at a time, and saturated (Tabi Table 2).",
        "hplm bench cascade --models models --requests requests.jsonl --json cascade.json --picture cascade.svg",
        {"models": DEMO, "requests_file": OPTIONS["requests_file"]},
        {"rounds": 1, "singles": 40, "seconds": 3.0},
    ),
    Experiment(
        "students",
        students,
        "Measure students by their number beside other bases: engine, latency, throughput, a burst (Student Parallelism, "
        "Table 2). The repository serves one trunk and other bases, with the same tenants: `hplm build fleet --students 6`.",
        "hplm bench students --trace trace.csv --models build/fleet-students/models --picture burst.svg",
        {
            "models": Path("build/fleet-students/models"),
            "trace": OPTIONS["trace"],
            "requests_file": Option(
                None,
                "JSON lines of task, tenant, text, label; default: the fleet's texts to all tenants.",
                "requests",
            ),
            "threads": Option(1, "Threads of torch in the engines that are timed here.", least=1),
        },
        {"rounds": 1, "singles": 30, "seconds": 3.0},
    ),
    Experiment(
        "response",
        response,
        "Measure response times by number of tenants that each send a request every 20 s, on a real server (HMI Fig. 12).",
        "hplm bench response --models build/fleet-minilm-10000/models --json response.json --picture response.svg",
        {
            "models": DEMO,
            "counts": RESPONSE_TENANTS,
            "rounds": 3,
            "duration_s": 60.0,
            "text_kind": "unseen",
            "quantizations": Option(
                [],
                "none or int8, of both stages. Give it twice, and two servers take turns. Default: as set.",
                "quantization",
                choices=get_args(Quantization),
            ),
        },
        {"counts": 2, "rounds": 1, "duration_s": 10.0},
        in_all="--models {minilm} --texts pool",
    ),
    Experiment(
        "burst",
        burst,
        "Measure response times of 250 clients, started 0.05 s apart, that send 50 requests each, every 1.2 s (HMI Fig. 13).",
        "hplm bench burst --models build/fleet-minilm-10000/models --json burst.json --picture burst.svg",
        {
            "models": DEMO,
            "scale": Option(1.0, "Number of clients, divided by 250.", least=0.004),
            "count": Option(50, "Requests of each client.", least=1),
            "rounds": 3,
            "text_kind": "unseen",
        },
        {"rounds": 1, "scale": 0.1, "count": 5},
        in_all="--models {minilm} --texts pool",
    ),
    Experiment(
        "waves",
        waves,
        "Measure response times of a few requests at once to a server that is idle before and after.",
        "hplm bench waves --at-once 8 --at-once 96 --json waves.json",
        {
            "models": DEMO,
            "sizes": Option(SIZES, "Requests per wave; again for more.", "at-once", least=1),
            "count": Option(20, "Waves of each size, one a second.", least=1),
            "text_kind": "unseen",
        },
        {"sizes": 3, "count": 5},
        in_all="--models {minilm} --texts pool",
    ),
    Experiment(
        "overload",
        overload,
        "Measure answers in time, and how soon requests are refused, if more arrive than can be answered.",
        "hplm bench overload --models build/fleet-minilm-10000/models --times 3 --times 10 --json overload.json",
        {
            "models": DEMO,
            "times": Option(TIMES, "Offered load, times the capacity; again for more.", least=0.1),
            "rounds": 3,
            "duration_s": 20.0,
            "deadline_s": Option(2.0, "Deadline of each request, in seconds.", "deadline", least=0.01),
            "text_kind": "shuffled",
        },
        {"rounds": 1, "duration_s": 5.0},
        in_all="--models {minilm}",
    ),
    Experiment(
        "recovery",
        recovery,
        "Measure the seconds until the next good answer of `hplm serve` after kill -9 of a stage's process, and of Triton.",
        "hplm bench recovery --trials 20 --json recovery.json",
        {"models": DEMO, "trials": Option(20, "Kills of a stub, and as many of Triton; 40 s for both.", least=1)},
    ),
    Experiment(
        "tenants",
        throughput_by_tenants,
        "Measure throughput by number of tenants, beside whole models in memory, adapters in all layers and ONNX Runtime "
        "(HMI Fig. 11). Build the fleet before: `hplm build fleet --shape minilm --tenants 10000`.",
        "hplm bench tenants --shape bert-base --json tenants.json --picture tenants.svg",
        {
            "shape": "minilm",
            "folder": None,
            "systems": Option(
                list(get_args(SystemName)), "System to measure; again for more.", "system", choices=get_args(SystemName)
            ),
            "counts": TENANTS,
            "popularities": Option(
                list(get_args(Popularity)), "How requests choose tenants.", "popularity", choices=get_args(Popularity)
            ),
            "duration_s": Option(help="Seconds per point.", flag="seconds", least=0.5),
            "warm_up_s": Option(
                help="Most seconds for first requests to all tenants, before a point.", flag="warm-up-seconds", least=0
            ),
            "generators": Option(help="Processes that send requests: one may be too slow for a GPU.", least=1),
            "response_s": Option(help="Seconds of open load after that; 0: none.", flag="response-seconds", least=0),
            "response_share": Option(
                help="Rate of the open load, as a share of hBERT's throughput.", least=0.05, most=0.95
            ),
            "num_threads": Option(
                help="Computing threads of every system: one process each, but threads of one process for whole models. "
                "hBERT's look-up stage has one more process, on a GPU as many more.",
                flag="threads",
                least=1,
            ),
            "budget_mb": Option(help="Memory for a peer's whole models.", least=1),
            "disk_mb": Option(help="Disk for the files of a peer's models.", least=1),
            "slots": Option(0, "num_slots of each encode process of hBERT; 0: as in the fleet, else 64.", least=0),
            "text_kind": "pool",
        },
        {"counts": 4, "rounds": 1, "warm_up_s": 2.0, "duration_s": 2.0, "response_s": 5.0},
        in_all="--shape bert-base --fleet {bert_fleet}",
        # No response times: a load of a few seconds would give meaningless ones.
        in_quick="--quick --popularity uniform --in-flight 32 --tenants 1 --tenants 16 --response-seconds 0 --disk-mb 2000",
    ),
    Experiment(
        "memory",
        memory_by_tenants,
        "Measure device, host and disk bytes of an added tenant, on a real server with all tenants in memory (HMI Table 2). "
        "Build the fleet before: `hplm build fleet`.",
        "hplm bench memory --shape bert-base --json memory.json",
        {"folder": None, "shape": "minilm", "counts": COUNTS},
        {"counts": 2},
        in_all="--fleet {minilm_fleet}",
    ),
    Experiment(
        "batching",
        batching,
        "Measure batching modes: saturated throughput, throughput and utility by rate, speed by row slots (TCB Figs. 9 to 14).",
        "hplm bench batching --policy das --mode packed --mode turbo --mode naive",
        {
            "models": FLEET,
            "modes": Option(list(MODES), "Batching mode; again for more.", "mode", choices=tuple(MODES)),
            "rounds": 3,
            "seconds": 15.0,
            "rates": Option(
                [0.5, 1.0, 2.0], "Arrival rate, times the first mode's throughput; again for more.", "rate"
            ),
            "policy": Option(
                "fcfs",
                "Policy of every mode except slotted: fcfs as in Figs. 11 and 12, das as in 9 and 10.",
                read=policy_of,
            ),
        },
        {"rounds": 1, "seconds": 3.0, "rates": 0},
        in_all="--models {bert}",
        # Batching and schedulers start many servers, so a quick look takes the small base.
        in_quick="--quick --models {minilm} --mode packed --mode turbo --mode naive --mode naive-100",
    ),
    Experiment(
        "schedulers",
        schedulers,
        "Measure policies at twice the capacity: utility, deadlines met, and the policies' own cost (TCB Figs. 15 and 16).",
        "hplm bench schedulers --policy das --policy sjf --json schedulers.json",
        {
            "models": FLEET,
            "policies": Option(list(POLICIES), "Scheduling policy; again for more.", "policy", read=policies_of),
            "rounds": 3,
            "seconds": 15.0,
        },
        {"settings": SETTINGS[1:2], "rounds": 1, "seconds": 5.0},
        in_all="--models {bert}",
        in_quick="--quick --models {minilm}",
    ),
    Experiment(
        "pipeline",
        pipeline,
        "Measure the speed-up of look-up and swapping at the same time as computing (HMI Table 6).",
        "hplm bench pipeline --models build/fleet-minilm-10000/models --look-up-threads 2 --json pipeline.json",
        {"models": FLEET, "rounds": 3, "seconds": 15.0, "look_up_threads": 0},
        {"rounds": 1, "seconds": 4.0},
        in_all="--models {minilm}",
        in_quick="--quick --seconds 2",
    ),
    Experiment(
        "limit",
        limit,
        "Measure the saturated upper layers' share of the machine's matrix peak, and the share of that through Triton.",
        "hplm bench limit --json limit.json --picture limit.svg",
        {"models": FLEET, "rounds": 5, "seconds": 10.0, "device_name": "auto"},
        {"rounds": 1, "seconds": 4.0},
        in_all="--models {bert}",
    ),
    Experiment(
        "int8",
        int8,
        "Measure the speed-up of the setting `quantization: int8`, for known and for new text, and how far int8 moves values.",
        "hplm bench int8 --json int8.json --picture int8.svg",
        {"models": FLEET, "rounds": 5, "seconds": 10.0, "look_up_threads": 0},
        {"rounds": 1, "seconds": 4.0},
    ),
    Experiment(
        "trace",
        trace,
        "Trace what each thread of both stages does while requests are under way (HMI Fig. 17).",
        "hplm bench trace --perfetto trace.json --picture trace.png",
        {
            "models": FLEET,
            "count": Option(512, "Requests per pass.", least=64),
            "slots": Option(65, "Adapter slots.", least=2),
            "perfetto": Option(None, "File for a trace that ui.perfetto.dev opens."),
        },
        in_all="--models {bert} --perfetto {out}/trace-perfetto.json",
        in_quick="--count 128",
    ),
    Experiment(
        "placement",
        placement_sweep,
        "Simulate placements of AlpaServe's models over one axis with each policy. A figure of AlpaServe's is a few options.",
        "hplm bench placement --models S2 --axis rate --value 10 --value 20 --value 40 --picture rate.svg",
        {
            "models": Option("S2", "AlpaServe's set of models.", choices=get_args(ModelSet)),
            "arrivals": Option(
                "skewed",
                "steady or skewed: as in the trace, or Gamma without one; gamma: a Gamma process for each model.",
                choices=get_args(Arrivals),
            ),
            "rate": Option(help="Requests/s of all models.", least=0.001),
            "cv": Option(help="Burstiness: cv of the gaps, or the factor on that of a trace.", least=0.01),
            "deadline": Option(help="Deadline, in multiples of a model's latency.", least=0.1),
            "ranking": Option(help="Another number makes other models popular.", least=0),
            "trace": Option(help="Recorded arrivals: a CSV file with a column TIMESTAMP."),
            "devices": Option(64, "Devices of 13 GB.", least=1),
            "axis": Option("rate", "What changes from point to point.", choices=get_args(Axis)),
            "values": Option(help="A value of the axis; again for more.", flag="value"),
            "policies": Option(
                list(PLACEMENT_POLICIES), "Policy; again for more.", "policy", choices=tuple(PLACEMENT_POLICIES)
            ),
            "changed": Option(False, "Make the placements for requests of which other models are popular."),
        },
        in_all="--models S2 --axis devices --value 16 --value 32 --value 64 --policy search --policy replication",
        in_quick="--quick --seconds 30",
    ),
    Experiment(
        "fidelity",
        device_fidelity,
        "Measure how well simulations predict real servers whose devices are cores (AlpaServe Table 2).",
        "hplm bench fidelity --models build/fleet-bert-base-16-whole/models",
        {"models": DEMO},
    ),
    Experiment(
        "emulated-fidelity",
        emulated_fidelity,
        "Measure how well simulations predict real servers whose eight devices wait in place of computing.",
        "chrt -r 10 hplm bench emulated-fidelity",
    ),
    Experiment(
        "search-time",
        search_time,
        "Measure the time of placement searches: 60 models on 64 devices, 10,000 tenants on eight nodes, a day's simulation.",
        "hplm bench search-time --json search-time.json",
    ),
)
