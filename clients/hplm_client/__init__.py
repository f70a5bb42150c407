"""Client of hplm: `Client`, `AsyncClient` and the typed answers; errors are those of `hplm.errors`."""

from hplm.wire import LabelledSpan
from hplm_client.answers import Prediction
from hplm_client.async_client import AsyncClient
from hplm_client.client import Client

__all__ = ["AsyncClient", "Client", "LabelledSpan", "Prediction"]
