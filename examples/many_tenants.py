"""Send texts of many tenants at once over gRPC, asynchronously: .venv/bin/python examples/many_tenants.py"""

import asyncio
import os

from hplm_client import AsyncClient

from hplm.errors import UnknownTenantError

TEXTS = {
    "films": "Two hours I will never get back.",
    "icd10": "Displaced fracture of shaft of left femur",
    "spam": "Are we still meeting for lunch tomorrow?",
    "phenotypes": "An abnormally small kidney.",
}


async def main() -> None:
    async with AsyncClient(os.environ.get("HPLM_GRPC", "grpc://127.0.0.1:8001")) as client:
        for answer in await asyncio.gather(*(client.predict(tenant, text) for tenant, text in TEXTS.items())):
            print(f"{answer.tenant:12} {answer.label} ({answer.score:.3f})")
        # Texts that are known at once cost less in one request, of 64 texts at most.
        print([answer.label for answer in await client.predict_batch(TEXTS.items())])
        try:
            await client.predict("nobody", "hello")
        except UnknownTenantError as error:
            print(f"{error.code}: {error}")


asyncio.run(main())
