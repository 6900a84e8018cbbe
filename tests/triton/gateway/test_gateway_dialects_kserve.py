"""tests/integration/test_dialects_kserve.py with Triton behind the gateway."""

import pytest

from tests.integration.test_dialects_kserve import *  # noqa: F403

pytestmark = pytest.mark.triton
