"""Client of hplm: `Client`, `AsyncClient`, for operators `ManageClient`, and their answers. Errors are in `hplm.errors`."""

from hplm.core.wire import LabelledSpan
from hplm_client.async_client import AsyncClient
from hplm_client.client import Client
from hplm_client.manage.answers import JobEvent
from hplm_client.manage.client import ManageClient
from hplm_client.prediction import Prediction

__all__ = ["AsyncClient", "Client", "JobEvent", "LabelledSpan", "ManageClient", "Prediction"]
