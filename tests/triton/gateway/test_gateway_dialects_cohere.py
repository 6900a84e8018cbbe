"""tests/integration/test_dialects_cohere.py with Triton behind the gateway."""

import pytest

from tests.integration.test_dialects_cohere import *  # noqa: F403

pytestmark = pytest.mark.triton
