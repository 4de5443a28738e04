"""Fixtures of all tests; test_all.py takes them too."""

import pytest

pytest.register_assert_rewrite("tests.common", "tests.stores")

from tests.common import _before_each_test, tiny  # noqa: E402, F401
