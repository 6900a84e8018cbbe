"""tests/integration/test_schema.py with Triton behind the gateway."""

import pytest

from tests.integration.test_schema import *  # noqa: F403

pytestmark = [pytest.mark.triton, pytest.mark.slow]
