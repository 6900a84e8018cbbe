"""tests/integration/test_service.py with Triton behind the gateway."""

import pytest

from tests.integration.test_service import *  # noqa: F403

pytestmark = pytest.mark.triton
