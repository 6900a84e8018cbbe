"""After a switch the former model, whose centers may be gigabytes, is freed."""

import asyncio
import gc
import weakref

from service.inference.found_model import find_model
from service.resources import open_resources
from service.settings import Settings


def test_nothing_keeps_a_model_that_a_switch_has_closed():
    async def former_is_freed():
        settings = Settings(model="fake:latency_ms=0", engine="fake")
        async with open_resources(settings, find_model(settings)) as resources:
            former, switch = weakref.ref(resources.model), resources.switch
            await switch._opened.aclose()  # what a switch does when no request has it any more
            switch._model = None
            del resources
            gc.collect()
            return former() is None

    assert asyncio.run(former_is_freed())
