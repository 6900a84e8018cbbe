"""tests/integration/test_service.py with Triton behind the gateway."""

import pytest

from tests.integration.test_service import *  # noqa: F403

pytestmark = pytest.mark.triton

# The batches are Triton's own, and counted by it: tests/triton/test_encoder.py.
del test_requests_at_once_share_batches  # noqa: F821
