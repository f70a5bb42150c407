"""HTTP to a server on this machine, or to a node of the operator's."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request

from hplm.errors import ConfigError, UnreachableError

# Opens URLs of this machine directly, whatever proxy the environment names.
LOCAL_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Bytes of a page at most. A metrics page with a thousand tenants has 2 MB.
MOST_PAGE_BYTES = 64 << 20
_PIECE_BYTES = 1 << 16


def fetch_page(url: str, *, timeout_s: float) -> str:
    """Return a page of text, such as a metrics page.

    Raises ConfigError if `url` is no address over HTTP, and UnreachableError, with the reason, if there is no whole page.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"the address of a page, such as http://HOST:8002/metrics, was expected, got {url!r}")
    until_s, page = time.monotonic() + timeout_s, bytearray()
    try:
        with LOCAL_HTTP.open(url, timeout=timeout_s) as reply:
            # `read1` returns after each packet, so a page that trickles ends in time too.
            while piece := reply.read1(_PIECE_BYTES):
                page += piece
                if len(page) > MOST_PAGE_BYTES:
                    raise UnreachableError(
                        f"{url}: the page has more than {MOST_PAGE_BYTES >> 20} MiB: check the address"
                    )
                if time.monotonic() > until_s:
                    raise TimeoutError(f"the page is not complete after {timeout_s:g} s")
            if reply.length:
                raise http.client.IncompleteRead(bytes(page), reply.length)
    except urllib.error.HTTPError as error:
        with error:
            raise UnreachableError(f"{url} answers with status {error.code}: check the port and the path") from None
    except http.client.IncompleteRead:
        raise UnreachableError(f"{url}: the page was cut off after {len(page):,} bytes") from None
    except (OSError, ValueError, http.client.InvalidURL) as error:
        raise UnreachableError(f"{url} does not answer: {getattr(error, 'reason', None) or error}") from None
    except http.client.HTTPException:
        raise UnreachableError(f"{url} does not speak HTTP/1, as a port for gRPC does not: check the port") from None
    return page.decode(errors="replace")
