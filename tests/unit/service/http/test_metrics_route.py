"""Metrics come while the store of collections does not answer."""

import asyncio
import threading

import httpx

from mlcd.service.http.app import create_app
from mlcd.service.inference.find_model import find_model
from mlcd.service.resources import open_resources
from mlcd.service.settings import Settings
from mlcd.service.telemetry.metrics import Metrics


def test_a_store_that_does_not_answer_takes_its_own_metrics_alone(monkeypatch):
    answers_again = threading.Event()

    def silent(self, seen):
        answers_again.wait(30)
        return b"mlcd_of_collections 1\n"

    async def scenario():
        settings = Settings(model="fake:latency_ms=0", engine="fake")
        async with open_resources(settings, find_model(settings)) as resources:
            app = httpx.ASGITransport(create_app(resources))
            async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
                scrapes = [client.get("/metrics") for _ in range(20)]
                async with asyncio.timeout(10):
                    without = await asyncio.gather(*scrapes)
                answers_again.set()
                return [*without, await client.get("/metrics")]

    monkeypatch.setattr(Metrics, "of_collections", silent)
    *without, whole = asyncio.run(scenario())
    for answer in without:
        assert answer.status_code == 200
        assert "mlcd_held" in answer.text
        assert "mlcd_of_collections" not in answer.text
    assert "mlcd_of_collections 1" in whole.text
