"""The example for the tests of other projects, as a project would run it."""

import pytest

from recipes.certify.test_engine import (
    test_an_engine_that_is_five_per_cent_too_hot_is_not,
    test_the_engine_is_certified,
)

pytestmark = pytest.mark.slow  # tests/certify has quick ones
__all__ = ["test_an_engine_that_is_five_per_cent_too_hot_is_not", "test_the_engine_is_certified"]
