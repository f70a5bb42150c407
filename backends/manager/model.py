"""Triton backend `manager`: REQUEST -> RESPONSE. Of a decoupled model, REQUEST -> a RESPONSE for every change of a job."""

import os
from functools import partial

import numpy as np

from hplm.core import wire
from hplm.core.settings import ManagerSettings, load_settings
from hplm.manage.job_counts import JobCounts
from hplm.manage.service import ManageService
from hplm.runtime.process import is_told_to_stop
from hplm.serving.manage_stage import ManageStage
from hplm.serving.watch_stage import WatchStage
from hplm.store.layout import Store
from hplm.triton.bridge import metrics, translate


class TritonPythonModel:
    def initialize(self, args):
        folder = translate.version_folder(args)
        settings = load_settings(ManagerSettings, folder / "settings.json")
        told = partial(is_told_to_stop, os.getppid())
        store = Store((folder / settings.store).resolve(), settings.registry)
        self._service = ManageService(store, settings, is_told_to_stop=told)
        self._jobs, gauges = None, {}
        if translate.is_decoupled(args):
            self._stage, name, about = WatchStage(self._service.handle), "watch", "Watches of jobs by outcome, events"
            self._stage.start()
        else:
            self._stage, name, about = ManageStage(self._service.handle), "manager", "Manage requests by outcome"
            self._jobs = JobCounts(store)
            gauges[metrics.MetricFamily("hplm_jobs", "Jobs in the registry", "state")] = self._jobs.read
        waiting = metrics.MetricFamily(f"hplm_{name}_waiting", "Requests not yet answered", "")
        self._metrics = metrics.MetricsPublisher(
            counters={metrics.MetricFamily(f"hplm_{name}_events_total", about, "event"): lambda: self._stage.counts},
            gauges={waiting: lambda: {"": self._stage.waiting}, **gauges},
        )

    def execute(self, requests):
        submit, count = self._stage.submit, self._stage.count_refused
        translate.submit_all(requests, self._read, submit, lambda request: self._write, count)

    def finalize(self):
        self._stage.stop()
        if self._jobs is not None:
            self._jobs.stop()
        self._service.close()
        self._metrics.stop()

    def _read(self, request):
        return translate.single(request, wire.REQUEST)

    def _write(self, answer):
        return translate.respond(RESPONSE=np.array([answer], dtype=np.object_))
