"""Client of hplm: `Client`, `AsyncClient`, for operators `ManageClient`, and typed answers; errors are `hplm.errors`'."""

from hplm.wire import LabelledSpan
from hplm_client.answers import Prediction
from hplm_client.async_client import AsyncClient
from hplm_client.client import Client
from hplm_client.manage import ManageClient
from hplm_client.manage_answers import JobEvent

__all__ = ["AsyncClient", "Client", "JobEvent", "LabelledSpan", "ManageClient", "Prediction"]
