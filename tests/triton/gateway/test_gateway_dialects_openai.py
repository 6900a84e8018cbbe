"""tests/integration/test_dialects_openai.py with Triton behind the gateway."""

import pytest

from tests.integration.test_dialects_openai import *  # noqa: F403

pytestmark = pytest.mark.triton
