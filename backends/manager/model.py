"""Triton backend `manager`: REQUEST -> RESPONSE."""

import os
from functools import partial

import numpy as np

from hplm.access.access_mode import access_mode
from hplm.access.key_ring import KeyRing
from hplm.access.proof import Prover
from hplm.core import wire
from hplm.jobs.job_counts import JobCounts
from hplm.manage.base_survey import survey_bases
from hplm.manage.current_settings import CurrentSettings
from hplm.manage.service import ManageService
from hplm.runtime.process import is_told_to_stop
from hplm.serving.manage_stage import ManageCall, ManageStage
from hplm.serving.request import Request
from hplm.store.layout import Store
from hplm.triton.bridge import credentials, metrics, translate
from hplm.triton.workarounds.dead_stubs import stubs_over


class TritonPythonModel:
    def initialize(self, args):
        folder = translate.version_folder(args)
        read_settings = CurrentSettings(folder / "settings.json")
        settings, models = read_settings(), folder.parents[1]
        store = Store((folder / settings.store).resolve(), settings.registry)
        mode = access_mode()
        if mode.needs_keys:
            credentials.check_model(args)
        self._service = ManageService(
            store,
            read_settings,
            is_told_to_stop=partial(is_told_to_stop, os.getppid()),
            survey_bases=lambda registry: survey_bases(models, store, registry, stubs_over(models)),
            ring=KeyRing(store, folder=mode.folder) if mode.needs_keys else None,
            prover=Prover(mode.proof_secret) if mode.needs_keys else None,
        )
        self._stage = stage = ManageStage(self._service.handle, self._service.admit, self._service.note_unread)
        self._jobs = JobCounts(store)
        events = metrics.MetricFamily("hplm_manager_events_total", "Manage requests by outcome", "event")
        waiting = metrics.MetricFamily("hplm_manager_waiting", "Requests not yet answered", "")
        jobs = metrics.MetricFamily("hplm_jobs", "Jobs in the registry", "state")
        self._metrics = metrics.MetricsPublisher(
            counters={events: lambda: stage.counts},
            gauges={waiting: lambda: {"": stage.waiting}, jobs: self._jobs.read},
        )

    def execute(self, requests):
        translate.submit_all(requests, self._read, self._submit, self._writer, self._stage.count_refused)

    def is_ready(self):
        # Triton from 26.03 on asks for it when a client asks for readiness.
        return self._stage.is_running

    def finalize(self):
        self._stage.stop()
        self._jobs.stop()
        self._service.close()
        self._metrics.stop()

    def _read(self, request):
        return ManageCall(translate.single(request, wire.REQUEST), credentials.single_key(request))

    def _submit(self, call, client):
        self._stage.submit(Request(call, client=client))

    def _writer(self, request):
        respond = translate.responder(request)
        return lambda answer: respond({wire.RESPONSE: np.array([answer], dtype=np.object_)})
