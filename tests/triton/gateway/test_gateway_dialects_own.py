"""tests/integration/test_dialects_own.py with Triton behind the gateway."""

import pytest

from tests.integration.test_dialects_own import *  # noqa: F403

pytestmark = pytest.mark.triton
