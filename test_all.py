"""Every test of ringblock: pytest test_all.py. Tests on real graphs skip without ../shared/data."""

import pytest

pytest.register_assert_rewrite("tests")

from tests.conftest import *  # noqa: E402, F403
from tests.conftest import _before_each_test, _queue  # noqa: E402, F401
from tests.test_sampler import *  # noqa: E402, F403
from tests.test_features import *  # noqa: E402, F403
from tests.test_cache import *  # noqa: E402, F403
from tests.test_plan import *  # noqa: E402, F403
from tests.test_model import *  # noqa: E402, F403
from tests.test_streams import *  # noqa: E402, F403
from tests.test_loader import *  # noqa: E402, F403
from tests.test_store import *  # noqa: E402, F403
from tests.test_sources import *  # noqa: E402, F403
from tests.test_tables import *  # noqa: E402, F403
from tests.test_disk import *  # noqa: E402, F403
from tests.test_train import *  # noqa: E402, F403
from tests.test_link import *  # noqa: E402, F403
from tests.test_checkpoint import *  # noqa: E402, F403
from tests.test_report import *  # noqa: E402, F403
from tests.test_accuracy import *  # noqa: E402, F403
from tests.test_edges import *  # noqa: E402, F403
from tests.test_bench import *  # noqa: E402, F403
from tests.test_house import *  # noqa: E402, F403
