"""After a switch the former model, whose centers may be gigabytes, is freed."""

import gc
import weakref
from types import SimpleNamespace

from mlcd.service.inference.find_model import find_model
from mlcd.service.resources import open_resources
from mlcd.service.settings import Settings


async def test_nothing_keeps_a_model_that_a_switch_has_closed():
    settings = Settings(model="fake:latency_ms=0", engine="fake")
    async with open_resources(settings, find_model(settings)) as resources:
        former, switch = weakref.ref(resources.model), resources.switch
        await switch._opened.aclose()  # what a switch does when no request has it any more
        # a model without centers, whose names the metrics look at
        switch._model = SimpleNamespace(data=SimpleNamespace(lookup=None))
        del resources
        gc.collect()
        assert former() is None
